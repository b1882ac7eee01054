"""What glibc does with memory that is freed.

By default it goes back to the system, and the next step gets it again page by page, zeroed: the tensors of a training
step, freed and made anew, cost a twentieth to a third of its time that way (docs/performance.md has the figures).
Processes that do nothing but train or measure therefore keep it. A library must not decide that for its caller, so
only headloom's own processes do: its commands and the workers of its studies.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names for them, from malloc.h
_kept = False


def keep_freed() -> bool:
    """Keep freed memory for the process's next requests, until it ends; whether it does (only glibc can be told)."""
    global _kept
    libc = _glibc()
    if libc is not None:
        # never cut the heap at its top, and take nothing from outside it; -1 is the largest size there is
        _kept = bool(libc.mallopt(_TRIM_THRESHOLD, -1)) and bool(libc.mallopt(_MMAP_MAX, 0))
    return _kept


def freed_memory() -> str | None:
    """What becomes of it: "kept", after `keep_freed`, "returned" to the system, or None where nothing can be told."""
    return None if _glibc() is None else "kept" if _kept else "returned"


def give_back() -> None:
    """Return what is free now, so that what the system has left can be asked."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The process's C library, if it is one that can be told."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
