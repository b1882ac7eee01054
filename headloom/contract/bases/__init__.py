"""Bases: where q, k and v come from, and what of a token the cache stores. One file each; the folder is walked."""

from __future__ import annotations

import importlib
import pkgutil

from headloom.contract.bases.base import BASES, PROJECTIONS, Base
from headloom.contract.bases.factor import FactorBase, FactorOptions
from headloom.contract.bases.grouped import GroupedBase
from headloom.contract.bases.latent import LatentBase, LatentOptions

__all__ = [
    "BASES",
    "PROJECTIONS",
    "Base",
    "FactorBase",
    "FactorOptions",
    "GroupedBase",
    "LatentBase",
    "LatentOptions",
]

for _found in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_found.name}")
