"""Curves from the metrics of runs. Those of the training loss are thinned on the way in: a drawn point is the mean loss
of a stretch of steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from headloom.records.metrics import read_curve_lines, read_train_lines
from headloom.records.reading import StudyRecords

BINS, FEWEST = 80, 16
POINTS = 4000  # of all runs together, so that a page of many runs stays small


@dataclass(frozen=True)
class Point:
    """A stretch of a training curve: its last step, what had been spent by then, the mean loss over the stretch.

    `tokens` and `flops` are None where the run did not count them.
    """

    step: int
    seconds: float
    loss: float
    tokens: float | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Curves:
    """Curves by variant and seed, with the steps a point averages."""

    by_variant: dict[str, dict[int, list[Point]]]
    width: int


def read_curves(study: StudyRecords) -> Curves:
    """The curves of the runs with the reported learning rate."""
    found = [(run, points) for run in study.chosen if (points := training_curve(study.place(run)))]
    last = max((points[-1].step for _, points in found), default=1)
    bins = max(FEWEST, min(BINS, POINTS // max(1, len(found))))
    width = stretch_width(last, bins)
    curves: dict[str, dict[int, list[Point]]] = {}
    for run, points in found:
        curves.setdefault(run.variant, {})[run.seed] = smooth(points, width)
    return Curves(curves, width)


def training_curve(place: Path) -> list[Point]:
    """The training losses of the run in a folder, without values that are not finite."""
    return _finite(Point(x.step, x.seconds, x.loss, x.tokens, x.flops) for x in read_train_lines(place))


def held_out_curve(place: Path) -> list[Point]:
    """What the evaluations along a run found; bits per byte stand for the loss."""
    return _finite(Point(x.step, x.seconds, x.bits_per_byte, x.tokens, x.flops) for x in read_curve_lines(place))


def _finite(points: Iterable[Point]) -> list[Point]:
    return [point for point in points if math.isfinite(point.loss) and math.isfinite(point.seconds)]


def stretch_width(steps: int, bins: int = BINS) -> int:
    """How many steps a drawn point averages, so that a curve has at most `bins` points."""
    return max(1, math.ceil(steps / bins))


def smooth(points: Sequence[Point], width: int) -> list[Point]:
    """Mean loss of each stretch of `width` steps, placed at the stretch's last recorded step.

    Stretches begin at step 1 for every run, so the same stretch of two seeds averages the same steps.
    """
    stretches: dict[int, list[Point]] = {}
    for point in points:
        stretches.setdefault(max(0, point.step - 1) // width, []).append(point)
    return [
        Point(end.step, end.seconds, math.fsum(point.loss for point in group) / len(group), end.tokens, end.flops)
        for _, group in sorted(stretches.items())
        for end in group[-1:]
    ]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds at every step that all curves have: of the loss, and of what had been spent."""
    if not curves:
        return []
    by_step = [{point.step: point for point in curve} for curve in curves]
    shared = sorted(set.intersection(*(set(curve) for curve in by_step)))
    return [
        Point(
            step,
            math.fsum(point.seconds for point in points) / len(points),
            math.fsum(point.loss for point in points) / len(points),
            _mean([point.tokens for point in points]),
            _mean([point.flops for point in points]),
        )
        for step in shared
        for points in [[curve[step] for curve in by_step]]
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None
