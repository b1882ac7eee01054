"""Quality against time, parameters and cache bytes, and the Pareto front: what no other beats by more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords
from headloom.report.style import MIDDLE, Panel, Section, colour, finish, named, shape

LOG_FROM = 5.0  # the largest over the smallest cost from which the axis is logarithmic
EQUAL = 0.01  # costs this close, relative to the largest, are one cost: there is no front to draw
TITLES = {
    "time": "training time (seconds)",
    "parameters": "parameters",
    "cache": "cache bytes",
}


def front(study: StudyRecords) -> Section | None:
    """One panel a cost in which the variants differ; time is always drawn.

    A run's time is its steps times the variant's step as it was measured, in turns with the others': how long a run
    took depends on what else its machine did. Where no steps were measured it is what the run took.
    """
    runs = _runs(study)
    if not runs:
        return None
    means, told = _means(study, runs), known_signs(study)
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
            best = on_front(group, None if equal else cost, told)
            for place in best:
                group[place]["front"] = True
            steps += [{"group": group[0]["group"], cost: group[i][cost], "bits": group[i]["bits"]} for i in best]
        datasets |= {f"quality-{cost}-means": marked, f"quality-{cost}-front": steps}
        panels.append(Panel(f"quality-{cost}", cost, _panel(study, cost, title, low, high)))
    return Section(
        name="quality",
        title="Quality against cost: the Pareto front",
        caption=(
            "Small marks are runs, large marks are means. Filled marks are on the front, which the dashed line joins. "
            "A variant is off the front where another one beats it: it is better than that one in neither cost nor "
            "quality by more than noise, and that one is better in either by more than noise, or else has fewer bits "
            "per byte. Beyond noise means: a paired 95 % interval of the qualities' difference without 0, a 95 % "
            "interval of the times' ratio (of steps measured in turns) without 1, other costs more than 1 % apart."
            + ("" if told else " This folder has no such intervals: the means alone decide.")
            + (" Variants that are compared with one another have a front of their own." if _many(means) else "")
        ),
        panels=tuple(panels),
        datasets=datasets,
        rows=runs,
        notes=tuple(notes),
    )


Told = dict[tuple[str, str], tuple[int, int]]


def known_signs(study: StudyRecords) -> Told:
    """(variant, other) -> the signs of what is known of bits per byte and of time: -1 where the variant's is smaller by
    more than noise, 1 where it is larger, 0 where the two are not told apart.

    Two qualities are told apart where the paired 95 % interval of their difference excludes 0, two times where the
    interval of the ratio of the measured times excludes 1. Where there is no interval (one seed, steps that were not
    measured) the numbers themselves decide.
    """
    found: Told = {}
    for pair in study.results.pairs:
        bits, time = pair.bits, pair.time
        signs = (
            _sign(bits.mean, bits.low, bits.high, 0.0),
            _sign(time.ratio, time.low, time.high, 1.0) if time else 0,
        )
        found[pair.variant, pair.other] = signs
        found[pair.other, pair.variant] = (-signs[0], -signs[1])
    return found


def _sign(value: float | None, low: float | None, high: float | None, none: float) -> int:
    """Of a value against what stands for no difference, where its interval excludes that."""
    low, high = (value, value) if low is None or high is None else (low, high)
    if low is None or high is None:
        return 0
    return int(low > none) - int(high < none)


def on_front(rows: Sequence[dict[str, Any]], cost: str | None, told: Told) -> list[int]:
    """Places of the rows that no other beats, the cheapest first. `cost` None: all cost the same.

    One beats another that is better than it in neither cost nor quality by more than noise, if it is better itself in
    one of them by more than noise, or else has fewer bits per byte. Of a cycle, which noise can make, the row with the
    fewest bits stays.
    """

    def signs(one: dict[str, Any], other: dict[str, Any]) -> tuple[int, int]:
        known = told.get((one["variant"], other["variant"]))
        bits = _sign(one["bits"] - other["bits"], None, None, 0.0) if known is None else known[0]
        if cost is None:
            return bits, 0
        if cost == "time" and known is not None:
            return bits, known[1]
        near = abs(one[cost] - other[cost]) <= (0.0 if cost == "time" else EQUAL * max(one[cost], other[cost]))
        return bits, 0 if near else _sign(one[cost] - other[cost], None, None, 0.0)

    def beats(one: dict[str, Any], other: dict[str, Any]) -> bool:
        bits, paid = signs(one, other)
        return max(bits, paid) <= 0 and (min(bits, paid) < 0 or one["bits"] < other["bits"])

    kept = [i for i, row in enumerate(rows) if not any(beats(other, row) for other in rows if other is not row)]
    kept = kept or [min(range(len(rows)), key=lambda i: rows[i]["bits"])]
    return sorted(kept, key=lambda i: rows[i][cost or "bits"])


def _runs(study: StudyRecords) -> list[dict[str, Any]]:
    by_label = {variant.label: variant for variant in study.variants}
    calibrated = _calibrated(study)
    return [
        {
            "variant": run.variant,
            "seed": run.seed,
            "time": by_label[run.variant].planned_seconds if calibrated else run.train_seconds,
            "parameters": by_label[run.variant].parameters,
            "cache": float(by_label[run.variant].cache_bytes),
            "bits": run.bits_per_byte,
        }
        for run in study.finished
    ]


def _calibrated(study: StudyRecords) -> bool:
    return all(variant.planned_seconds is not None for variant in study.variants)


def _means(study: StudyRecords, runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    means = []
    for variant in study.variants:
        mine = [row for row in runs if row["variant"] == variant.label]
        if mine:
            mean = {key: math.fsum(row[key] for row in mine) / len(mine) for key in ("time", "bits")}
            means.append(
                {
                    "variant": variant.label,
                    "group": study.groups[variant.label],
                    "parameters": variant.parameters,
                    "cache": float(variant.cache_bytes),
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


def _panel(study: StudyRecords, cost: str, title: str, low: float, high: float) -> dict[str, Any]:
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
