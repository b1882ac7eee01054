"""What the C library (glibc) does with freed memory.

By default it returns large blocks to the operating system, and the next training step has to ask for them again; the
system hands them out page by page and fills them with zeros. For the tensors of a training step this takes 5 to 30 % of
the step's time (figures in docs/performance.md). Processes that only train or measure therefore keep freed memory. A
library must not decide this for the program that imports it, so only headloom's own processes do it: its commands and
the workers of its studies.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # mallopt's names for them, from malloc.h
_kept = False


def keep_freed() -> bool:
    """Keep freed memory for later use by this process, until it ends. False where that is impossible (not glibc)."""
    global _kept
    libc = _glibc()
    if libc is not None:
        # never shrink the heap, and allocate nothing outside of it; -1 stands for the largest possible size
        _kept = bool(libc.mallopt(_TRIM_THRESHOLD, -1)) and bool(libc.mallopt(_MMAP_MAX, 0))
    return _kept


def freed_memory() -> str | None:
    """What happens to freed memory: "kept" (after `keep_freed`), "returned" to the system, or None if unknown."""
    return None if _glibc() is None else "kept" if _kept else "returned"


def give_back() -> None:
    """Return the memory that is free now to the system, so that the system's free memory can be measured."""
    libc = _glibc()
    if libc is not None:
        libc.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """The process's C library, if it is glibc."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    return libc if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim") else None
