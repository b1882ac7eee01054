"""Floor 3: the only floor that knows transformers. Grafts, families, saving and loading.

Names are loaded when first used: what is wrong with a path or a number is said before transformers and torch are
imported. transformers' AutoConfig is told about saved grafts when it is imported (headloom._hook).
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "FoldReport": "headloom.hf.folding",
    "GraftReport": "headloom.hf.grafting",
    "HFCache": "headloom.hf.cache",
    "HeadloomConfig": "headloom.hf.config",
    "build_model": "headloom.hf.build",
    "fold": "headloom.hf.folding",
    "graft": "headloom.hf.grafting",
    "mix_names": "headloom.hf.groups",
    "no_decay_names": "headloom.hf.groups",
    "parameter_groups": "headloom.hf.groups",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "FoldReport",
    "GraftReport",
    "HFCache",
    "HeadloomConfig",
    "build_model",
    "fold",
    "graft",
    "mix_names",
    "no_decay_names",
    "parameter_groups",
]
