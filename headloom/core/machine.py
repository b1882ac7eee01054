"""The machine a program runs on: processor, cores, memory, versions, and the number of processes that share the work.

No host names and no paths: everything that is recorded with a result may be published.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

from headloom.core.heap import freed_memory

DECISIVE = ("torch", "transformers", "accelerate", "tokenizers", "numpy", "headloom")
"""Packages whose version may change the numbers of a run."""


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def world_size() -> int:
    """How many processes make this run together (torchrun, accelerate launch)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def versions() -> dict[str, str]:
    """Package -> version, for Python and the packages in DECISIVE; "not installed" where a package is missing."""
    found = {"python": platform.python_version()}
    for package in DECISIVE:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, str | int | float]:
    """Processor, architecture, cores, memory in GiB and operating system."""
    import psutil

    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
    }


def ran_on(accelerator: str | None = None, *, sharded: bool = False) -> dict[str, str | int | float]:
    """The machine and how this process uses it: what happens to freed memory (where known), the accelerator (if one was
    used), the number of processes (if more than one), and whether the weights are sharded over them."""
    about = machine()
    if freed := freed_memory():
        about["freed_memory"] = freed
    if world_size() > 1:
        about["processes"] = world_size()
    if sharded:
        about["sharding"] = "FSDP"
    if accelerator:
        about["accelerator"] = accelerator
    return about


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
