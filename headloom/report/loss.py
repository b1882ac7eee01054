"""Training loss against what it was paid with: steps, tokens, FLOPs, seconds. One figure, one axis at a time."""

from __future__ import annotations

from typing import Any

import altair as alt

from headloom.report.curves import Point, mean_curve, read_curves
from headloom.report.records import Study
from headloom.report.style import Panel, Section, colour, finish, named

AXES = {
    "steps": ("step", "training step", "~s"),
    "tokens": ("tokens", "tokens predicted in training", "~s"),
    "flops": ("flops", "training FLOPs", "~s"),
    "seconds": ("seconds", "training time of the run (seconds)", "~s"),
}
TABS = {"flops": "FLOPs"}


def loss(study: Study) -> Section | None:
    """Thin lines are seeds, the thick one is the mean of the finished ones."""
    curves = read_curves(study)
    if not curves.by_variant:
        return None
    done = {(run["variant"], run["seed"]) for run in study.finished}
    thin = [
        {"variant": label, "seed": seed, **_row(point)}
        for label, seeds in curves.by_variant.items()
        for seed, curve in seeds.items()
        for point in curve
    ]
    thick = [
        {"variant": label, **_row(point)}
        for label, seeds in curves.by_variant.items()
        for point in mean_curve([curve for seed, curve in seeds.items() if (label, seed) in done])
    ]
    window = _window([point for seeds in curves.by_variant.values() for curve in seeds.values() for point in curve])
    known = [axis for axis, (field, _, _) in AXES.items() if any(row[field] is not None for row in thin)]
    averaged = "every recorded loss" if curves.width == 1 else f"the mean loss of {curves.width} steps"
    return Section(
        name="loss",
        title="Training loss against what it cost",
        caption=(
            f"Each point is {averaged}; thin lines are seeds, the thick line is their mean. The first losses run off "
            "the top so that the ends can be told apart. FLOPs count visible pairs of positions; seconds are each "
            "run's own training time on this machine, without evaluation."
        ),
        panels=tuple(Panel(f"loss-{axis}", TABS.get(axis, axis), _panel(study, axis, window)) for axis in known),
        datasets={"loss-seeds": thin, "loss-mean": thick},
        rows=thin,
    )


def _row(point: Point) -> dict[str, Any]:
    return {
        "step": point.step,
        "tokens": point.tokens,
        "flops": None if point.flops is None else float(f"{point.flops:.5g}"),
        "seconds": float(f"{point.seconds:.6g}"),
        "loss": round(point.loss, 5),
    }


def _panel(study: Study, axis: str, window: tuple[float, float]) -> dict[str, Any]:
    field, title, form = AXES[axis]
    bottom, top = window
    x = alt.X(f"{field}:Q", title=title, axis=alt.Axis(tickCount=6, format=form))
    # A line breaks where it leaves the window: Vega's own clipping makes writing the PNG files fifty times slower.
    within = {"shown": f"datum.loss > {top} ? null : datum.loss"}
    y = alt.Y("shown:Q", title="training loss (nats per token)", scale=alt.Scale(domain=[bottom, top], nice=False))
    seeds = (
        alt.Chart(named("loss-seeds"))
        .transform_calculate(**within)
        .mark_line(strokeWidth=1, strokeOpacity=0.35)
        .encode(x=x, y=y, color=colour(study), detail="seed:N")
    )
    means = (
        alt.Chart(named("loss-mean"))
        .transform_calculate(**within)
        .mark_line(strokeWidth=2.5)
        .encode(
            x=x,
            y=y,
            color=colour(study),
            tooltip=["variant:N", alt.Tooltip(f"{field}:Q"), alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return finish(alt.layer(seeds, means), 340)


def _window(points: list[Point]) -> tuple[float, float]:
    """Bottom and top of the losses drawn: the lowest, and the highest of the last 85 % of steps, with a margin."""
    last = max(point.step for point in points)
    late = [point.loss for point in points if point.step > 0.15 * last] or [point.loss for point in points]
    bottom, top = min(point.loss for point in points), max(late)
    margin = 0.04 * ((top - bottom) or 1.0)
    return bottom - margin, top + margin
