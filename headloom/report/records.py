"""What a study folder holds, read back: study.json, results.json, and each run's metrics.jsonl.

study.json    spec, data, machine, versions, command, timing       written before the first run
results.json  variants, runs, headlines, notes, config differences  rewritten after each run
runs/<variant>-seed<k>/metrics.jsonl   one JSON object a line: step, tokens, seconds, loss, ...
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError

BINS = 80


@dataclass(frozen=True)
class Study:
    """A study folder's records as plain dicts."""

    folder: Path
    study: dict[str, Any]
    results: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        return [variant["label"] for variant in self.results["variants"]]

    @property
    def finished(self) -> list[dict[str, Any]]:
        return [run for run in self.results["runs"] if run["status"] == "finished"]


@dataclass(frozen=True)
class Point:
    """A stretch of a training curve: its last step, the seconds trained by then, the mean loss over the stretch."""

    step: int
    seconds: float
    loss: float


def read_study(folder: Path | str) -> Study:
    """The records of a study folder; HeadloomError if it is not one."""
    folder = Path(folder)
    return Study(folder, _read(folder / "study.json"), _read(folder / "results.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadloomError(
            f"'{path.parent}' holds no {path.name}: give the folder that headloom compare wrote"
        ) from None
    except (ValueError, OSError) as error:
        raise HeadloomError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise HeadloomError(f"'{path}' holds {type(found).__name__}, not a study's records")
    return found


def read_curve(path: Path) -> list[Point]:
    """The training losses in metrics.jsonl. A line cut short by a crash and losses that are not finite are left out."""
    points = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            record = json.loads(line)
            if record.get("kind", "train") != "train":  # a validation
                continue
            point = Point(int(record["step"]), float(record["seconds"]), float(record["loss"]))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if math.isfinite(point.loss) and math.isfinite(point.seconds):
            points.append(point)
    return points


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
        Point(group[-1].step, group[-1].seconds, math.fsum(point.loss for point in group) / len(group))
        for _, group in sorted(stretches.items())
    ]


def mean_curve(curves: Sequence[Sequence[Point]]) -> list[Point]:
    """The mean over seeds at every step that all curves have: of the loss, and of the seconds."""
    if not curves:
        return []
    by_step = [{point.step: point for point in curve} for curve in curves]
    shared = sorted(set.intersection(*(set(curve) for curve in by_step)))
    n = len(curves)
    return [
        Point(
            step,
            math.fsum(curve[step].seconds for curve in by_step) / n,
            math.fsum(curve[step].loss for curve in by_step) / n,
        )
        for step in shared
    ]
