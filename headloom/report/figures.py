"""The figures of a comparison as Vega-Lite specifications (plain dicts), built with Altair.

Every value drawn is one that a run recorded. Curves are means over stretches of steps (`records.smooth`); the page says
how long a stretch is.
"""

from __future__ import annotations

from typing import Any

import altair as alt

from headloom.report.records import Point, Study, mean_curve, read_curve, smooth, stretch_width

# Distinguishable for most readers with colour blindness, and on a white and on a dark ground; from the tenth variant on
# the same hues in another lightness.
PALETTE = ["#7f8894", "#e8871e", "#2f8fd8", "#3aa66b", "#d1495b", "#9b6fd0", "#b59a1b", "#2fb3b3", "#c45ab3"]
PALETTE += ["#b9c0c9", "#a85a00", "#8cc4f0", "#1d7044", "#f09aa5", "#6a3fa8", "#dcc863", "#12787a", "#8a2f7b"]
SHAPES = [
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "stroke",
    "arrow",
    "wedge",
    "triangle",
]
HEIGHT = 300


def all_figures(study: Study) -> dict[str, dict[str, Any]]:
    """Name -> specification, for the figures this study has data for."""
    curves = _curves(study)
    found = {
        "difference": difference(study),
        "loss-steps": _loss(study, curves, "step", "training step"),
        "loss-seconds": _loss(study, curves, "seconds", "training time of the run (seconds)"),
        "quality-time": quality(study),
    }
    return {name: spec for name, spec in found.items() if spec is not None}


def _legend() -> alt.Legend:
    return alt.Legend(title=None, orient="top", symbolStrokeWidth=3, symbolOpacity=1, labelLimit=300, columns=4)


def colour(study: Study, legend: bool = True) -> alt.Color:
    """One colour a variant, the same in every figure and in the table."""
    labels = study.labels
    return alt.Color(
        "variant:N",
        scale=alt.Scale(domain=labels, range=[PALETTE[i % len(PALETTE)] for i in range(len(labels))]),
        legend=_legend() if legend else None,
    )


def difference(study: Study) -> dict[str, Any] | None:
    """Difference to the reference with its 95 % interval, one row a variant; left of zero is better."""
    reference = study.results["reference"]
    rows = [
        {
            "variant": variant["label"],
            "difference": found["mean"],
            "low": found["low"] if found["low"] is not None else found["mean"],
            "high": found["high"] if found["high"] is not None else found["mean"],
            "seeds": found["n"],
        }
        for variant in study.results["variants"]
        if (found := variant.get("difference")) and found["mean"] is not None
    ]
    if not rows:
        return None
    base = alt.Chart(alt.Data(values=rows)).encode(
        y=alt.Y("variant:N", sort=[row["variant"] for row in rows], title=None, axis=alt.Axis(labelLimit=220)),
        color=colour(study, legend=False),
        tooltip=[
            alt.Tooltip("variant:N"),
            alt.Tooltip("difference:Q", format="+.5f"),
            alt.Tooltip("low:Q", format="+.5f", title="95 % from"),
            alt.Tooltip("high:Q", format="+.5f", title="to"),
            alt.Tooltip("seeds:Q"),
        ],
    )
    title = f"bits per byte minus {reference}'s (left of zero is better)"
    x = alt.X("difference:Q", title=title, scale=alt.Scale(zero=True), axis=alt.Axis(tickCount=6))
    interval = base.mark_rule(strokeWidth=3).encode(x=alt.X("low:Q", title=title), x2="high:Q")
    centre = base.mark_point(filled=True, size=110, opacity=1).encode(x=x)
    zero = (
        alt.Chart(alt.Data(values=[{"zero": 0}]))
        .mark_rule(strokeDash=[4, 4], color="#888")
        .encode(x=alt.X("zero:Q", title=title))
    )
    return _finish(alt.layer(zero, interval, centre), 40 + 44 * len(rows))


def quality(study: Study) -> dict[str, Any] | None:
    """Bits per byte against the training time of each run: small marks are seeds, the large one is their mean."""
    rows: list[dict[str, Any]] = [
        {
            "variant": run["variant"],
            "seed": run["seed"],
            "seconds": run["train_seconds"],
            "bits": run["bits_per_byte"],
        }
        for run in study.finished
    ]
    if not rows:
        return None
    means = []
    for label in study.labels:
        mine = [row for row in rows if row["variant"] == label]
        if mine:
            means.append(
                {
                    "variant": label,
                    "seconds": sum(row["seconds"] for row in mine) / len(mine),
                    "bits": sum(row["bits"] for row in mine) / len(mine),
                    "seeds": len(mine),
                }
            )
    x = alt.X("seconds:Q", title="training time of the run (seconds)", scale=alt.Scale(zero=False, padding=24))
    y = alt.Y("bits:Q", title="bits per byte (lower is better)", scale=alt.Scale(zero=False, padding=16))
    labels = study.labels
    shape = alt.Shape(
        "variant:N",
        scale=alt.Scale(domain=labels, range=[SHAPES[i % len(SHAPES)] for i in range(len(labels))]),
        legend=_legend(),
    )
    number = [alt.Tooltip("seconds:Q", format=".1f"), alt.Tooltip("bits:Q", format=".5f", title="bits per byte")]
    seeds = (
        alt.Chart(alt.Data(values=rows))
        .mark_point(filled=True, size=45, opacity=0.55)
        .encode(x=x, y=y, color=colour(study), shape=shape, tooltip=["variant:N", "seed:Q", *number])
    )
    centre = (
        alt.Chart(alt.Data(values=means))
        .mark_point(filled=False, size=260, strokeWidth=3, opacity=1)
        .encode(x=x, y=y, color=colour(study), shape=shape, tooltip=["variant:N", "seeds:Q", *number])
    )
    return _finish(alt.layer(seeds, centre), HEIGHT)


def _curves(study: Study) -> dict[str, dict[int, list[Point]]]:
    width = stretch_width(study.study["spec"]["steps"])
    found: dict[str, dict[int, list[Point]]] = {}
    for run in study.results["runs"]:
        curve = smooth(read_curve(study.folder / run["folder"] / "metrics.jsonl"), width)
        if curve:
            found.setdefault(run["variant"], {})[run["seed"]] = curve
    return found


def _loss(study: Study, curves: dict[str, dict[int, list[Point]]], field: str, title: str) -> dict[str, Any] | None:
    """Training loss: thin lines are seeds, the thick one is the mean of the finished ones."""
    if not curves:
        return None
    done = {(run["variant"], run["seed"]) for run in study.finished}
    thin = [
        {"variant": label, "seed": seed, field: _value(point, field), "loss": round(point.loss, 5)}
        for label, seeds in curves.items()
        for seed, curve in seeds.items()
        for point in curve
    ]
    thick = [
        {"variant": label, field: _value(point, field), "loss": round(point.loss, 5)}
        for label, seeds in curves.items()
        for point in mean_curve([curve for seed, curve in seeds.items() if (label, seed) in done])
    ]
    losses = [point for seeds in curves.values() for curve in seeds.values() for point in curve]
    top, bottom = _window(losses)
    x = alt.X(f"{field}:Q", title=title, axis=alt.Axis(tickCount=6))
    y = alt.Y("loss:Q", title="training loss (nats per token)", scale=alt.Scale(domain=[bottom, top], nice=False))
    seeds_layer = (
        alt.Chart(alt.Data(values=thin))
        .mark_line(strokeWidth=1, opacity=0.35, clip=True)
        .encode(x=x, y=y, color=colour(study), detail="seed:N")
    )
    mean_layer = (
        alt.Chart(alt.Data(values=thick))
        .mark_line(strokeWidth=2.5, clip=True)
        .encode(
            x=x,
            y=y,
            color=colour(study),
            tooltip=["variant:N", alt.Tooltip(f"{field}:Q"), alt.Tooltip("loss:Q", format=".4f")],
        )
    )
    return _finish(alt.layer(seeds_layer, mean_layer), HEIGHT)


def _value(point: Point, field: str) -> float:
    return point.step if field == "step" else round(point.seconds, 3)


def _window(points: list[Point]) -> tuple[float, float]:
    """Top and bottom of the losses drawn: the lowest, and the highest of the last 85 % of steps, with a margin."""
    last = max(point.step for point in points)
    late = [point.loss for point in points if point.step > 0.15 * last] or [point.loss for point in points]
    bottom, top = min(point.loss for point in points), max(late)
    margin = 0.04 * ((top - bottom) or 1.0)
    return top + margin, bottom - margin


def _finish(chart: Any, height: int) -> dict[str, Any]:
    spec: dict[str, Any] = chart.properties(width="container", height=height, background="transparent").to_dict()
    spec.pop("$schema", None)
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec
