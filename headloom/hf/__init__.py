"""Headloom's attention in transformers' models: families, grafts, folding, saving and loading.

Names are loaded when first used: what is wrong with a path or a number is said before transformers and torch are
imported. transformers' AutoConfig is told about saved grafts when it is imported (headloom._hook).
"""

from __future__ import annotations

import importlib
from typing import Any

_LAZY = {
    "FoldReport": "headloom.hf.model.reports",
    "GraftReport": "headloom.hf.model.reports",
    "HFCache": "headloom.hf.model.cache",
    "HeadloomConfig": "headloom.hf.registration",
    "build_around": "headloom.hf.grafting.build",
    "build_model": "headloom.hf.grafting.build",
    "fold": "headloom.hf.grafting.fold",
    "graft": "headloom.hf.grafting.graft",
    "mix_names": "headloom.hf.grafting.groups",
    "no_decay_names": "headloom.hf.grafting.groups",
    "parameter_groups": "headloom.hf.grafting.groups",
    "register_family": "headloom.hf.model.family",
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
    "build_around",
    "build_model",
    "fold",
    "graft",
    "mix_names",
    "no_decay_names",
    "parameter_groups",
    "register_family",
]
