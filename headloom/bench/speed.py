"""Timing: interleaved, warmed up, synchronised; medians with their spread."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, the quartiles beside it, and every sample."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    def over(self, other: Timing) -> Timing:
        """How many times `other`'s, repetition by repetition: both were taken in turns, so drift cancels."""
        return Timing.of([mine / theirs for mine, theirs in zip(self.samples, other.samples, strict=True)])

    def per(self, parts: float) -> Timing:
        """The timing of one of equal `parts`."""
        return Timing.of([sample / parts for sample in self.samples])

    def spread(self) -> dict[str, float]:
        return {"median": self.median, "low": self.low, "high": self.high}

    def to_dict(self) -> dict[str, Any]:
        return {**self.spread(), "samples": list(self.samples)}

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Quartiles need two samples; with one, all three are it."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(median, low, high, tuple(samples))


def synchronise() -> None:
    """Wait until the accelerator has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measured_seconds(call: Callable[[], object], device: str | None = None) -> float:
    """Of one call: between two events on "cuda", else on the clock, from quiet to quiet."""
    synchronise()
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        synchronise()
        return start.elapsed_time(end) / 1000
    began = time.perf_counter()
    call()
    synchronise()
    return time.perf_counter() - began


def interleaved(
    calls: dict[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    on_call: Callable[[], None] | None = None,
    device: str | None = None,
) -> dict[str, Timing]:
    """Time `calls` in turn, A B C A B C ..., so that a machine's drift falls on all alike.

    >>> timings = interleaved({"nothing": lambda: None}, repeats=3)
    >>> len(timings["nothing"].samples)
    3
    """
    assert repeats >= 1 and warmup >= 0
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(warmup + repeats):
        for name, call in calls.items():
            took = measured_seconds(call, device)
            if turn >= warmup:
                samples[name].append(took)
            if on_call is not None:
                on_call()
    return {name: Timing.of(values) for name, values in samples.items()}
