"""The runs of a study as they are in its folder, and which of them there are: a grid of learning rates decides on more.

A finished run is read once and kept in memory: its files do not change after result.json, so what the end of a run
costs does not grow with the number of runs before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headloom.lab.plan.places import folder_of
from headloom.lab.spec.resolved import StudySpec
from headloom.records.results import FailedRun, FinishedRun, StudyRun, WaitingRun
from headloom.records.runs import FAILURE, MIXES, PICTURES, RESULT, RunFailure, RunResult


@dataclass(frozen=True)
class KnownRun:
    """One run: which, its folder inside the study's, and what came of it (neither: it is waiting)."""

    variant: str
    seed: int
    learning_rate: float
    folder: str
    result: RunResult | None = None
    failure: RunFailure | None = None
    mixes: bool = False
    pictures: bool = False

    @property
    def status(self) -> Literal["waiting", "failed", "finished"]:
        """Where it stands."""
        return "failed" if self.failure else "finished" if self.result else "waiting"

    def record(self, *, chosen: bool) -> StudyRun:
        """As it stands in results.json. chosen: whether its learning rate is the reported one."""
        which = {"variant": self.variant, "seed": self.seed, "learning_rate": self.learning_rate, "folder": self.folder}
        if self.failure:
            return FailedRun(**which, reason=self.failure.reason, chosen=chosen)  # type: ignore[arg-type]
        if self.result is None:
            return WaitingRun(**which, chosen=chosen)  # type: ignore[arg-type]
        return FinishedRun(
            **which,  # type: ignore[arg-type]
            bits_per_byte=self.result.bits_per_byte,
            perplexity=self.result.perplexity,
            selection_bits_per_byte=self.result.selection_bits_per_byte,
            train_seconds=self.result.train_seconds,
            tokens_per_second=self.result.tokens_per_second,
            parameters=self.result.parameters,
            weights=self.result.weights,
            step_time=self.result.step_time_seconds,
            mixes=self.mixes,
            pictures=self.pictures,
            chosen=chosen,
        )


Runs = Mapping[tuple[str, float, int], KnownRun]


class RunReader:
    """Reads the runs of a study in its folder."""

    def __init__(self, spec: StudySpec, folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._finished: dict[str, KnownRun] = {}

    def forget(self) -> None:
        """Read everything again: runs were moved."""
        self._finished.clear()

    def read(self, label: str, seed: int, learning_rate: float) -> KnownRun:
        """One run. Raises HeadloomError for a damaged file."""
        name = folder_of(self._spec, label, seed, learning_rate)
        if name in self._finished:
            return self._finished[name]
        place = self._folder / name
        failure = FAILURE.read_if_there(place)
        if failure is not None:
            return KnownRun(label, seed, learning_rate, name, failure=failure)
        result = RESULT.read_if_there(place)
        if result is None:
            return KnownRun(label, seed, learning_rate, name)
        mixes, pictures = (place / MIXES).is_file(), (place / PICTURES).is_file()
        found = KnownRun(label, seed, learning_rate, name, result=result, mixes=mixes, pictures=pictures)
        self._finished[name] = found
        return found

    def all(self) -> list[tuple[KnownRun, bool]]:
        """Every run and whether its learning rate is the chosen one, seed by seed: those of the grid, those beyond its
        edges, and those at the rate that was chosen.

        Nothing else decides which runs a study has: what lies beyond an edge follows from what the runs before it
        recorded, so a study that is stopped and goes on makes the same ones.
        """
        spec = self._spec
        known = {
            (variant.label, rate, seed): self.read(variant.label, seed, rate)
            for seed in spec.seeds[: spec.grid_seeds]
            for variant in spec.variants
            for rate in spec.learning_rates
        }
        chosen = {}
        for variant in spec.variants:
            label, rates = variant.label, list(spec.learning_rates)
            chosen[label] = best_rate(spec, label, rates, known)
            while (beyond := rate_beyond(spec, rates, chosen[label])) is not None:
                rates = sorted([*rates, beyond])
                for seed in spec.seeds[: spec.grid_seeds]:
                    known[label, beyond, seed] = self.read(label, seed, beyond)
                chosen[label] = best_rate(spec, label, rates, known)
        for seed in spec.seeds[spec.grid_seeds :]:
            for variant in spec.variants:
                rate = chosen[variant.label]
                if rate is not None:
                    known[variant.label, rate, seed] = self.read(variant.label, seed, rate)
        return [(run, run.learning_rate == chosen[run.variant]) for run in known.values()]


def rate_beyond(spec: StudySpec, rates: Sequence[float], best: float | None) -> float | None:
    """The rate to try next: beyond the edge at which the best of `rates` (ascending) lies, as far from it as its
    neighbour on the other side. None where the best is inside, or not known yet, or enough have been added.
    """
    added = len(rates) - len(spec.learning_rates)
    if best not in (rates[0], rates[-1]) or added >= spec.extend_grid:
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:.6g}")  # as it stands in the run's folder


def is_beyond(spec: StudySpec, seed: int, rate: float) -> bool:
    """Whether this is a run of the grid at a rate that was added to it."""
    return rate not in spec.learning_rates and seed in spec.seeds[: spec.grid_seeds]


def best_rate(spec: StudySpec, label: str, rates: Sequence[float], runs: Runs) -> float | None:
    """Of `rates`, the learning rate with the fewest bits per byte on the selection split, over the seeds of the grid.

    None while runs of the grid are missing. A rate at which a seed failed counts only when all of them have failures.
    """
    if not spec.has_grid:
        return spec.learning_rates[0]
    scores: list[tuple[int, float, float]] = []
    for rate in rates:
        mine = [runs[label, rate, seed] for seed in spec.seeds[: spec.grid_seeds]]
        if any(run.status == "waiting" for run in mine):
            return None
        found = [bits for run in mine if run.result and (bits := run.result.selection_bits_per_byte) is not None]
        mean = math.fsum(found) / len(found) if found else math.inf
        scores.append((len(mine) - len(found), mean, rate))
    return min(scores)[2]
