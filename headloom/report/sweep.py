"""Quality along a declared axis (number of heads, context, ...): one line a mechanism, where a study sweeps one."""

from __future__ import annotations

from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords
from headloom.records.results import VariantResult
from headloom.report.style import Panel, Section, colour_of, finish, named
from headloom.report.tables import setting_text

FEWEST = 3  # values of an axis that make a line
LOG_FROM = 8.0  # the largest over the smallest value from which the axis is logarithmic


def sweep(study: StudyRecords) -> Section | None:
    """One panel an axis of `settings` with at least three values; None without such an axis."""
    rows = [
        {**row, "axis": axis, "value": value}
        for variant in study.variants
        if (row := _row(variant)) is not None
        for axis, value in variant.settings.items()
    ]
    axes = {
        axis: sorted({row["value"] for row in rows if row["axis"] == axis}) for axis in {r["axis"]: 0 for r in rows}
    }
    axes = {axis: values for axis, values in axes.items() if len(values) >= FEWEST}
    if not axes:
        return None
    series = list(dict.fromkeys(row["series"] for row in rows))
    datasets = {f"sweep-{place}": [row for row in rows if row["axis"] == axis] for place, axis in enumerate(axes)}
    panels = [
        Panel(f"sweep-{place + 1}", axis, _panel(f"sweep-{place}", axis, values, series))
        for place, (axis, values) in enumerate(axes.items())
    ]
    return Section(
        name="sweep",
        title=f"Quality along {next(iter(axes))}" if len(axes) == 1 else "Quality along the study's axes",
        caption="Mean over seeds; the bar is one standard deviation to either side. One line a mechanism.",
        panels=tuple(panels),
        datasets=datasets,
        rows=[row for data in datasets.values() for row in data],
    )


def _row(variant: VariantResult) -> dict[str, Any] | None:
    bits, settings = variant.bits_per_byte, variant.settings
    if bits.mean is None:
        return None
    options = [f"{key}={setting_text(value)}" for key, value in variant.options.items() if key not in settings]
    sd = bits.sd or 0.0
    return {
        "series": ":".join([variant.mechanism, *options]),
        "variant": variant.label,
        "mean": bits.mean,
        "low": bits.mean - sd,
        "high": bits.mean + sd,
        "seeds": bits.n,
    }


def _panel(data: str, axis: str, values: list[float], series: list[str]) -> dict[str, Any]:
    log = values[0] > 0 and values[-1] >= LOG_FROM * values[0]
    scale = alt.Scale(type="log", base=2, padding=20, nice=False) if log else alt.Scale(zero=False, padding=20)
    x = alt.X(
        "value:Q",
        title=f"{axis}, logarithmic" if log else axis,
        scale=scale,
        axis=alt.Axis(values=values, format="~g", labelOverlap="greedy", labelSeparation=7),
    )
    title = "bits per byte (lower is better)"
    y = alt.Y("mean:Q", title=title, scale=alt.Scale(zero=False, padding=20))
    tooltip = ["variant:N", "value:Q", alt.Tooltip("mean:Q", format=".5f"), "seeds:Q"]
    colour = alt.Color(
        "series:N",
        scale=alt.Scale(domain=series, range=[colour_of(place) for place in range(len(series))]),
        legend=alt.Legend(title=None),
    )
    base = alt.Chart(named(data)).encode(x=x, color=colour)
    bars = base.mark_rule(strokeWidth=1.5).encode(y=alt.Y("low:Q", title=title), y2="high:Q")
    lines = base.mark_line(strokeWidth=2).encode(y=y)
    marks = base.mark_point(filled=True, size=70, opacity=1).encode(y=y, tooltip=tooltip)
    return finish(alt.layer(bars, lines, marks))
