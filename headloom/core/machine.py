"""What this process may use of the machine."""

from __future__ import annotations

import os


def cores() -> int:
    """Processor cores this process may use: those it is bound to where the system says so, else all."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
