"""Headloom's attention in transformers' models: families, grafts, folding, saving and loading.

Importing it tells transformers' AutoConfig about saved grafts and gives the rotary scalings; modelling code is
imported when first used.
"""

from __future__ import annotations

import importlib
from typing import Any

from transformers.models.auto.configuration_auto import AutoConfig

from headloom.hf.model.config import MODEL_TYPE, HeadloomConfig

AutoConfig.register(MODEL_TYPE, HeadloomConfig, exist_ok=True)

_LAZY = {
    "FoldReport": "headloom.hf.grafting.fold",
    "GraftReport": "headloom.hf.grafting.graft",
    "HFCache": "headloom.hf.model.cache",
    "build_around": "headloom.hf.grafting.build",
    "build_model": "headloom.hf.grafting.build",
    "fold": "headloom.hf.grafting.fold",
    "graft": "headloom.hf.grafting.graft",
    "mix_names": "headloom.hf.grafting.groups",
    "no_decay_names": "headloom.hf.grafting.groups",
    "parameter_groups": "headloom.hf.grafting.groups",
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
]
