"""Names of a package that are imported from their modules when they are first used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, places: Mapping[str, Sequence[str]], others: Callable[[str], Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package whose names load when first used.

    Args:
        package: its `__name__`, for the AttributeError of a name that it does not have.
        places: module -> the names to import from it.
        others: finds what is not among these, or raises AttributeError.
    """
    module_of = {name: module for module, names in places.items() for name in names}

    def load(name: str) -> Any:
        if name not in module_of:
            if others is not None and not name.startswith("_"):
                return others(name)
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(module_of[name]), name)

    return load, lambda: sorted(module_of), sorted(module_of)
