"""Headloom's attention in transformers' models: families, grafts, folding, saving and loading.

Names are loaded when first used, so that commands can report a wrong path or number before transformers and torch are
imported. transformers' AutoConfig learns of saved grafts when it is imported (headloom._hook).
"""

from __future__ import annotations

from headloom.core.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "headloom.hf.grafting.build": ("build_around", "build_model"),
        "headloom.hf.grafting.fold": ("fold",),
        "headloom.hf.grafting.graft": ("graft",),
        "headloom.hf.grafting.groups": ("mix_names", "no_decay_names", "parameter_groups"),
        "headloom.hf.model.cache": ("HFCache",),
        "headloom.hf.model.family": ("register_family",),
        "headloom.hf.model.reports": ("FoldReport", "GraftReport"),
        "headloom.hf.registration": ("HeadloomConfig",),
    },
)
