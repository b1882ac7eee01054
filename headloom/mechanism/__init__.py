"""One file a mechanism, their registry, and schedules of them over the layers of a model.

The folder is walked: nothing lists the names.
"""

from __future__ import annotations

import sys

from headloom.contract.attention import Attention
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding
from headloom.contract.maps import Maps
from headloom.mechanism.registry import (
    MechanismInfo,
    attention,
    build_from_config,
    built_config,
    foldable,
    layer_config,
    make_config,
    maps,
    mechanisms,
    register,
    register_folder,
    taken,
)

register_folder(sys.modules[__name__])

__all__ = [
    "Attention",
    "AttentionConfig",
    "Folding",
    "Maps",
    "MechanismInfo",
    "attention",
    "build_from_config",
    "built_config",
    "foldable",
    "layer_config",
    "make_config",
    "maps",
    "mechanisms",
    "register",
    "taken",
]
