"""Quality against time, parameters and cache bytes, with the Pareto front: the variants no other beats in both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from headloom.report.records import Study
from headloom.report.style import MIDDLE, Panel, Section, colour, finish, named, shape

LOG_FROM = 5.0  # the largest over the smallest cost from which the axis is logarithmic
EQUAL = 0.01  # costs this close, relative to the largest, are one cost: there is no front to draw
TITLES = {
    "time": "training time (seconds)",
    "parameters": "parameters",
    "cache": "cache bytes",
}


def front(study: Study) -> Section | None:
    """One panel a cost in which the variants differ; time is always drawn.

    A run's time is its steps times the variant's step as it was measured, in turns with the others': how long a run
    took depends on what else its machine did. Where no steps were measured it is what the run took.
    """
    runs = _runs(study)
    if not runs:
        return None
    means = _means(study, runs)
    panels, notes, datasets = [], [], {"quality-runs": runs}
    for cost, title in TITLES.items():
        known = [row for row in means if row[cost] is not None]
        if len(known) < 2 and cost != "time":
            continue
        low, high = min(row[cost] for row in known), max(row[cost] for row in known)
        equal = high - low <= EQUAL * high
        if equal:
            spread = (
                "exactly equal"
                if high == low
                else f"equal within {max(1e-4, (high - low) / high):.2%}".replace("%", " %")
            )
            notes.append(f"All variants are {spread} in {title.removesuffix(' (seconds)')}: no front to draw there.")
            if cost != "time":
                continue
        marked = [{**row, "front": False} for row in known]
        steps = []
        for group in _groups(marked):
            best = pareto([(0.0 if equal else row[cost], row["bits"]) for row in group])
            for place in best:
                group[place]["front"] = True
            steps += [{"group": group[0]["group"], cost: group[i][cost], "bits": group[i]["bits"]} for i in best]
        datasets |= {f"quality-{cost}-means": marked, f"quality-{cost}-front": steps}
        panels.append(Panel(f"quality-{cost}", cost, _panel(study, cost, title, low, high)))
    return Section(
        name="quality",
        title="Quality against cost: the Pareto front",
        caption=(
            "Small marks are runs, one a seed; large marks are their means. Filled: on the front, that is, no variant "
            "is both cheaper and better. The line joins the front's members; towards the lower left is better."
            + (" Times are steps times the measured step." if _calibrated(study) else "")
            + (" Variants that are compared with one another have a front of their own." if _many(means) else "")
        ),
        panels=tuple(panels),
        datasets=datasets,
        rows=runs,
        notes=tuple(notes),
    )


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Places of the points that no other dominates (at most as large in both, smaller in one), by the first number.

    >>> pareto([(1.0, 3.0), (2.0, 2.0), (3.0, 2.5), (2.0, 2.0)])
    [0, 1, 3]
    """
    found: list[int] = []
    for place in sorted(range(len(points)), key=lambda i: points[i]):
        if not found or points[place][1] < points[found[-1]][1] or points[place] == points[found[-1]]:
            found.append(place)
    return found


def _runs(study: Study) -> list[dict[str, Any]]:
    by_label = {variant["label"]: variant for variant in study.results["variants"]}
    calibrated = _calibrated(study)
    return [
        {
            "variant": run["variant"],
            "seed": run["seed"],
            "time": by_label[run["variant"]]["planned_seconds"] if calibrated else run["train_seconds"],
            "parameters": by_label[run["variant"]]["parameters"],
            "cache": cache_bytes(by_label[run["variant"]]),
            "bits": run["bits_per_byte"],
        }
        for run in study.finished
    ]


def _calibrated(study: Study) -> bool:
    return all(variant.get("planned_seconds") is not None for variant in study.results["variants"])


def cache_bytes(variant: dict[str, Any]) -> float:
    """Of one whole sequence, or of a token where the records do not know the sequence."""
    whole = variant.get("cache_bytes")
    return float(whole if whole is not None else variant["cache_bytes_per_token"])


def _means(study: Study, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    means = []
    for variant in study.results["variants"]:
        mine = [row for row in runs if row["variant"] == variant["label"]]
        if mine:
            mean = {key: math.fsum(row[key] for row in mine) / len(mine) for key in ("time", "bits")}
            means.append(
                {
                    "variant": variant["label"],
                    "group": study.group(variant),
                    "parameters": variant["parameters"],
                    "cache": cache_bytes(variant),
                    "seeds": len(mine),
                    **mean,
                }
            )
    return means


def _groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    return list(groups.values())


def _many(means: list[dict[str, Any]]) -> bool:
    return len(_groups(means)) > 1


def _panel(study: Study, cost: str, title: str, low: float, high: float) -> dict[str, Any]:
    log = low > 0 and high >= LOG_FROM * low
    # equal costs stand beside zero, or the axis would show nothing but their last digits
    linear = alt.Scale(zero=high - low <= EQUAL * high, padding=24)
    scale = alt.Scale(type="log", padding=24, nice=False) if log else linear
    title = f"{title}, logarithmic" if log else title
    x = alt.X(f"{cost}:Q", title=title, scale=scale, axis=alt.Axis(tickCount=5, format="~s", labelOverlap=True))
    y = alt.Y("bits:Q", title="bits per byte (lower is better)", scale=alt.Scale(zero=False, padding=16))
    number = [alt.Tooltip(f"{cost}:Q", format=",.6~g"), alt.Tooltip("bits:Q", format=".5f", title="bits per byte")]
    line = (
        alt.Chart(named(f"quality-{cost}-front"))
        .mark_line(interpolate="step-after", strokeDash=[5, 4], strokeWidth=1.5, color=MIDDLE)
        .encode(x=x, y=y, detail="group:N")
    )
    seeds = (
        alt.Chart(named("quality-runs"))
        .mark_point(filled=True, size=40, opacity=0.5)
        .encode(x=x, y=y, color=colour(study), shape=shape(study), tooltip=["variant:N", "seed:Q", *number])
    )
    front = alt.Tooltip("front:N", title="on the front")
    centre = alt.Chart(named(f"quality-{cost}-means")).encode(
        x=x, y=y, color=colour(study), shape=shape(study), tooltip=["variant:N", "seeds:Q", *number, front]
    )
    beaten = centre.transform_filter("!datum.front").mark_point(filled=False, size=230, strokeWidth=2.5, opacity=1)
    best = centre.transform_filter("datum.front").mark_point(filled=True, size=260, opacity=1)
    return finish(alt.layer(line, seeds, beaten, best), 320)
