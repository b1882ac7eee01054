"""Training loss against what it was paid with: steps, tokens, FLOPs, seconds. One figure, one axis at a time."""

from __future__ import annotations

from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords
from headloom.report.curves import Point, mean_curve, read_curves
from headloom.report.style import Panel, Section, colour, finish, named

AXES = {
    "steps": ("step", "training step", "~s"),
    "tokens": ("tokens", "tokens predicted in training", "~s"),
    "flops": ("flops", "training FLOPs", "~s"),
    "seconds": ("seconds", "training time (seconds)", "~s"),
}
TABS = {"flops": "FLOPs"}


def loss(study: StudyRecords) -> Section | None:
    """Thin lines are seeds, the thick one is the mean of the finished ones."""
    curves = read_curves(study)
    if not curves.by_variant:
        return None
    done = {(run.variant, run.seed) for run in study.finished}
    thin = [
        {"variant": label, "seed": seed, **row(point, "loss")}
        for label, seeds in curves.by_variant.items()
        for seed, curve in seeds.items()
        for point in curve
    ]
    thick = [
        {"variant": label, **row(point, "loss")}
        for label, seeds in curves.by_variant.items()
        for point in mean_curve([curve for seed, curve in seeds.items() if (label, seed) in done])
    ]
    shown = window([point for seeds in curves.by_variant.values() for curve in seeds.values() for point in curve])
    known = [axis for axis, (field, _, _) in AXES.items() if any(r[field] is not None for r in thin)]
    averaged = "every recorded loss" if curves.width == 1 else f"the mean loss of {curves.width} steps"
    return Section(
        name="loss",
        title="Training loss against what it cost",
        caption=(
            f"Each point is {averaged}; thin lines are seeds, the thick line is their mean. Seconds are what each run "
            "took itself, without evaluation."
        ),
        panels=tuple(
            Panel(
                f"loss-{axis}",
                TABS.get(axis, axis),
                lines(study, "loss", axis, "loss", "training loss (nats per token)", shown),
            )
            for axis in known
        ),
        datasets={"loss-seeds": thin, "loss-mean": thick},
        rows=thin,
    )


def row(point: Point, name: str) -> dict[str, Any]:
    """A point as it is drawn; `name` is what its value is called."""
    return {
        "step": point.step,
        "tokens": point.tokens,
        "flops": None if point.flops is None else float(f"{point.flops:.5g}"),
        "seconds": float(f"{point.seconds:.6g}"),
        name: round(point.loss, 5),
    }


def lines(
    study: StudyRecords,
    data: str,
    axis: str,
    value: str,
    title: str,
    shown: tuple[float, float],
    *,
    marks: bool = False,
    rule: Any = None,
) -> dict[str, Any]:
    """Curves against one axis: of the data sets `data`-seeds and `data`-mean, whose values are called `value`.

    shown: bottom and top. marks: a mark at every point of the mean. rule: another layer, below the lines.
    """
    field, name, form = AXES[axis]
    x = alt.X(f"{field}:Q", title=name, axis=alt.Axis(tickCount=6, format=form))
    # A line breaks where it leaves the window: Vega's own clipping makes writing the PNG files fifty times slower.
    within = {"shown": f"datum.{value} > {shown[1]} ? null : datum.{value}"}
    y = alt.Y("shown:Q", title=title, scale=alt.Scale(domain=list(shown), nice=False))
    seeds = (
        alt.Chart(named(f"{data}-seeds"))
        .transform_calculate(**within)
        .mark_line(strokeWidth=1, strokeOpacity=0.35)
        .encode(x=x, y=y, color=colour(study), detail="seed:N")
    )
    means = (
        alt.Chart(named(f"{data}-mean"))
        .transform_calculate(**within)
        .mark_line(strokeWidth=2.5, point=alt.OverlayMarkDef(size=40) if marks else False)
        .encode(
            x=x,
            y=y,
            color=colour(study),
            tooltip=["variant:N", alt.Tooltip(f"{field}:Q"), alt.Tooltip(f"{value}:Q", format=".4f")],
        )
    )
    return finish(alt.layer(*([] if rule is None else [rule]), seeds, means), 340)


def window(points: list[Point]) -> tuple[float, float]:
    """Bottom and top of what is drawn: the lowest, and the highest of the last 85 % of steps, with a margin."""
    last = max(point.step for point in points)
    late = [point.loss for point in points if point.step > 0.15 * last] or [point.loss for point in points]
    bottom, top = min(point.loss for point in points), max(late)
    margin = 0.04 * ((top - bottom) or 1.0)
    return bottom - margin, top + margin
