"""The figures of a study as Vega-Lite specifications (plain dicts), built with Altair.

Every value drawn is one that a run recorded, or a mean over seeds of such values.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords
from headloom.report.front import front
from headloom.report.held_out import held_out
from headloom.report.loss import loss
from headloom.report.mixes import mixes
from headloom.report.rates import learning_rates
from headloom.report.style import MIDDLE, Panel, Section, colour, finish, named
from headloom.report.sweep import sweep


def all_sections(study: StudyRecords) -> list[Section]:
    """The sections with figures this study has data for, in the page's order."""
    found = (make(study) for make in (held_out, difference, sweep, front, learning_rates, mixes, loss))
    return [section for section in found if section is not None]


def difference(study: StudyRecords) -> Section | None:
    """Difference to the reference with its 95 % interval, one row a variant; left of zero is better."""
    rows: list[dict[str, Any]] = []
    seeds: list[dict[str, Any]] = []
    values = {variant.label: variant.bits_per_byte.values for variant in study.variants}
    for variant in study.variants:
        found = variant.difference
        if found is None or found.mean is None:
            continue
        label, against = variant.label, variant.against
        rows.append(
            {
                "variant": label,
                "against": against,
                "difference": found.mean,
                "low": found.low if found.low is not None else found.mean,
                "high": found.high if found.high is not None else found.mean,
                "p_holm": found.p_holm,
                "seeds": found.n,
            }
        )
        theirs = values.get(against or "", {})
        seeds += [
            {"variant": label, "seed": seed, "difference": value - theirs[seed]}
            for seed, value in values[label].items()
            if seed in theirs
        ]
    if not rows:
        return None
    one = len({row["against"] for row in rows}) == 1
    return Section(
        name="difference",
        title=f"Difference to {rows[0]['against']}" if one else "Difference to each variant's reference",
        caption=(
            "Paired by seed: small marks are seeds, the large one is their mean, the bar its 95 % t interval. The bar "
            "is not corrected for several comparisons; the sentences and the table's verdicts are (Holm)."
        ),
        panels=(Panel("difference", "", _difference(study, [row["variant"] for row in rows])),),
        datasets={"difference": rows, "difference-seeds": seeds},
        rows=rows,
    )


def _difference(study: StudyRecords, labels: list[str]) -> dict[str, Any]:
    title = ["bits per byte minus the reference's", "(left of zero is better)"]
    x = alt.X(
        "difference:Q",
        title=title,
        scale=alt.Scale(zero=True, padding=14),
        axis=alt.Axis(tickCount=alt.ExprRef("width < 400 ? 4 : 8")),
    )
    y = alt.Y("variant:N", sort=labels, axis=None)
    tooltip = [
        alt.Tooltip("variant:N"),
        alt.Tooltip("against:N"),
        alt.Tooltip("difference:Q", format="+.5f"),
        alt.Tooltip("low:Q", format="+.5f", title="95 % from"),
        alt.Tooltip("high:Q", format="+.5f", title="to"),
        alt.Tooltip("seeds:Q"),
    ]
    # Names stand above their bars and not on an axis: there a long one would take the width of the drawing.
    names = (
        alt.Chart(named("difference"))
        .mark_text(align="left", baseline="middle", yOffset=-15, dx=6, limit=alt.ExprRef("width - 12"))
        .encode(y=y, x=alt.value(0), text="variant:N")
    )
    base = alt.Chart(named("difference")).encode(y=y, color=colour(study, legend=False), tooltip=tooltip)
    zero = alt.Chart(alt.Data(values=[{"zero": 0}])).mark_rule(strokeDash=[4, 4], color=MIDDLE)
    seeds = (
        alt.Chart(named("difference-seeds"))
        .mark_point(filled=True, size=32, opacity=0.55, yOffset=12)
        .encode(x=x, y=y, color=colour(study, legend=False), tooltip=["variant:N", "seed:Q", "difference:Q"])
    )
    interval = base.mark_rule(strokeWidth=3).encode(x=alt.X("low:Q", title=title), x2="high:Q")
    centre = base.mark_point(filled=True, size=110, opacity=1).encode(x=x)
    layers = alt.layer(zero.encode(x=alt.X("zero:Q", title=title)), seeds, interval, centre, names)
    return finish(layers, 20 + (54 if len(labels) <= 10 else 44) * len(labels))
