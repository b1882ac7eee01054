"""Learning-rate curves: the grid of every variant on the split that chooses, the chosen rate ringed."""

from __future__ import annotations

from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords
from headloom.report.style import Panel, Section, colour, finish, named

LOG_FROM = 2.0  # the worst over the best mean from which the quality axis is logarithmic


def learning_rates(study: StudyRecords) -> Section | None:
    """None where no grid was asked for, or nothing of it has finished."""
    rows, failed = [], []
    for variant in study.variants:
        for entry in variant.grid:
            spread = entry.selection_bits_per_byte
            row = {"variant": variant.label, "rate": entry.learning_rate}
            if entry.failed:
                failed.append({**row, "failed": entry.failed})
            if spread.mean is not None:
                sd = spread.sd or 0.0
                rows.append(
                    {
                        **row,
                        "mean": spread.mean,
                        "low": spread.mean - sd,
                        "high": spread.mean + sd,
                        "seeds": spread.n,
                        "failed": entry.failed,
                        "chosen": entry.learning_rate == variant.learning_rate,
                    }
                )
    if not rows:
        return None
    added = any(variant.grid_added for variant in study.variants)
    return Section(
        name="learning-rates",
        title="Learning rates",
        caption=(
            "Bits per byte on the selection split, which is not the reported one: mean over seeds, the bar is one "
            "standard deviation to either side. The ring marks the rate whose runs are reported"
            + ("; a variant whose best lay at the grid's edge was tried beyond it" * added)
            + ("; a cross at the top marks a rate at which runs failed." if failed else ".")
        ),
        panels=(Panel("learning-rates", "", _panel(study, rows, failed)),),
        datasets={"rates": rows, "rates-failed": failed},
        rows=rows,
    )


def _panel(study: StudyRecords, rows: list[dict[str, Any]], failed: list[dict[str, Any]]) -> dict[str, Any]:
    means = [row["mean"] for row in rows]
    log = min(means) > 0 and max(means) > LOG_FROM * min(means)
    ticks = sorted({row["rate"] for row in (*rows, *failed)})
    x = alt.X(
        "rate:Q",
        title="peak learning rate, logarithmic",
        scale=alt.Scale(type="log", padding=20, nice=False),
        axis=alt.Axis(values=ticks, format="~e", labelOverlap="greedy", labelSeparation=7),
    )
    title = "selection bits per byte" + (", logarithmic" if log else "")
    scale = alt.Scale(type="log", padding=20, nice=False) if log else alt.Scale(zero=False, padding=20)
    y = alt.Y("mean:Q", title=title, scale=scale)
    tooltip = [
        "variant:N",
        alt.Tooltip("rate:Q", format="~e", title="learning rate"),
        alt.Tooltip("mean:Q", format=".5f"),
        "seeds:Q",
        "failed:Q",
    ]
    base = alt.Chart(named("rates")).encode(x=x, color=colour(study))
    bars = base.mark_rule(strokeWidth=1.5, opacity=0.7).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    lines = base.mark_line(strokeWidth=2).encode(y=y)
    marks = base.mark_point(filled=True, size=50, opacity=1).encode(y=y, tooltip=tooltip)
    ring = base.transform_filter("datum.chosen").mark_point(size=260, strokeWidth=2.5, opacity=1).encode(y=y)
    layers = [bars, lines, marks, ring]
    if failed:
        layers.append(
            alt.Chart(named("rates-failed"))
            .mark_point(shape="M-1,-1L1,1M1,-1L-1,1", size=90, strokeWidth=2.5, opacity=1)
            .encode(x=x, y=alt.value(9), color=colour(study), tooltip=["variant:N", "rate:Q", "failed:Q"])
        )
    return finish(alt.layer(*layers))
