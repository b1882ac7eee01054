"""Timing: interleaved, warmed up, synchronised; medians with their spread."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median, the quartiles beside it, and every sample."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]

    @classmethod
    def of(cls, samples: list[float]) -> Timing:
        """Quartiles need two samples; with one, all three are it."""
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else samples * 3
        return cls(median, low, high, tuple(samples))


def synchronise() -> None:
    """Wait until the accelerator has done what was asked of it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def interleaved(
    calls: dict[str, Callable[[], object]],
    *,
    repeats: int = 5,
    warmup: int = 1,
    on_call: Callable[[], None] | None = None,
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
            synchronise()
            start = time.perf_counter()
            call()
            synchronise()
            if turn >= warmup:
                samples[name].append(time.perf_counter() - start)
            if on_call is not None:
                on_call()
    return {name: Timing.of(values) for name, values in samples.items()}
