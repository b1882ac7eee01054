"""The peak of memory that one call takes, in bytes.

On CPU PyTorch's profiler reports every allocation and release of PyTorch's allocator, in order: those that a fused
kernel or the autograd engine makes inside C++ too, which a mode over Python's operators would not see. Their running
sum is exact and the same at every call (scratch memory that a matrix library keeps to itself is not in it). On CUDA it
is the allocator's own peak. What was there before the call (weights, input) does not count; gradients made in it do.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import torch

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler would tell stderr when it starts and stops


def peak_bytes(call: Callable[[], object], device: str = "cpu") -> int:
    """The largest number of bytes that were held at once because of `call`.

    >>> def three() -> None:
    ...     one, two = torch.empty(1000), torch.empty(500)
    ...     del one
    ...     torch.empty(900)
    >>> peak_bytes(three)
    6000
    """
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    results = profile.profiler.kineto_results
    events = [event for event in results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
