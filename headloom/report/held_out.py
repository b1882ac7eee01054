"""Bits per byte on held-out text along the runs, against what it was paid with, and what is read from these curves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords
from headloom.report.curves import Point, held_out_curve, mean_curve
from headloom.report.loss import AXES, TABS, lines, row, window
from headloom.report.style import MIDDLE, Panel, Section

TITLE = "validation bits per byte (lower is better)"


def held_out(study: StudyRecords) -> Section | None:
    """Thin lines are seeds, the thick one their mean, a mark an evaluation; None where no run was evaluated on the way.

    Seconds are steps times the measured step, as in every comparison of times; the run's own clock where no step was
    measured.
    """
    steps = {variant.label: variant.step_time.median for variant in study.variants if variant.step_time}
    curves: dict[str, dict[int, list[Point]]] = {}
    for run in study.chosen:
        points = held_out_curve(study.place(run))
        if len(points) > 1:
            step = steps.get(run.variant)
            points = [p if step is None else replace(p, seconds=p.step * step) for p in points]
            curves.setdefault(run.variant, {})[run.seed] = points
    if not curves:
        return None
    done = {(run.variant, run.seed) for run in study.finished}
    thin = [
        {"variant": label, "seed": seed, **row(point, "bits")}
        for label, seeds in curves.items()
        for seed, curve in seeds.items()
        for point in curve
    ]
    thick = [
        {"variant": label, **row(point, "bits")}
        for label, seeds in curves.items()
        for point in mean_curve([curve for seed, curve in seeds.items() if (label, seed) in done])
    ]
    shown = window([point for seeds in curves.values() for curve in seeds.values() for point in curve])
    ends = _ends(study)
    known = [axis for axis, (field, _, _) in AXES.items() if any(r[field] is not None for r in thin)]
    panels = [
        Panel(
            f"held-out-{axis}",
            TABS.get(axis, axis),
            lines(
                study,
                "held-out",
                axis,
                "bits",
                TITLE,
                shown,
                marks=True,
                rule=_rule(ends) if axis == "seconds" else None,
            ),
        )
        for axis in known
    ]
    return Section(
        name="held-out",
        title="Held-out quality along the runs",
        caption=(
            "Thin lines are seeds, the thick line is their mean, a mark is an evaluation on the same part of the "
            "validation text. The first values run off the top so that the ends can be told apart. FLOPs count visible "
            "pairs of positions; seconds are steps times the measured step"
            + (f", and the dashed line is the whole training time of {' and of '.join(ends)}." if ends else ".")
        ),
        panels=tuple(panels),
        datasets={"held-out-seeds": thin, "held-out-mean": thick},
        rows=thin,
    )


def _ends(study: StudyRecords) -> dict[str, float]:
    """The references that others are read at the end of, with their training time."""
    found = {}
    for variant in study.variants:
        read = variant.at_time
        if read and variant.against is None:
            found[variant.label] = read.seconds
    return found


def _rule(ends: dict[str, float]) -> Any:
    if not ends:
        return None
    data = alt.Data(values=[{"reference": label, "seconds": seconds} for label, seconds in ends.items()])
    return alt.Chart(data).mark_rule(strokeDash=[4, 4], color=MIDDLE).encode(x="seconds:Q", tooltip=["reference:N"])
