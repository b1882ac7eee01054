"""Headloom: more attention heads from the same parameters, and an honest account of whether they paid.

    import headloom as hl
    attn = hl.attention("iha", hidden_size=256, num_heads=8, num_kv_heads=2, pseudo_heads=4)
    out_BTD = attn(x_BTD)

Names are loaded when first used: `import headloom` itself is light. After it, transformers' `AutoConfig` and
`AutoModelForCausalLM` know saved headloom models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from headloom import _hook
from headloom.core.lazy import attach

__version__ = "0.1.0"

if TYPE_CHECKING:
    from headloom.core.errors import HeadloomError, RunError
    from headloom.costs.count import cost
    from headloom.hf.grafting.build import build_model
    from headloom.hf.grafting.fold import fold
    from headloom.hf.grafting.graft import graft
    from headloom.hf.grafting.groups import mix_names, parameter_groups
    from headloom.lab.compare import compare
    from headloom.lab.study import Study
    from headloom.mechanism import Attention, Maps, attention, foldable, make_config, maps, mechanisms, register
    from headloom.mechanism.schedules import schedule, schedules
    from headloom.ops.bit import pack_bits
    from headloom.ops.cache import Cache
    from headloom.ops.masks import Causal, Dense, Documents, Exactly, Padding, Window

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "headloom.core.errors": ("HeadloomError", "RunError"),
        "headloom.costs.count": ("cost",),
        "headloom.hf.grafting.build": ("build_model",),
        "headloom.hf.grafting.fold": ("fold",),
        "headloom.hf.grafting.graft": ("graft",),
        "headloom.hf.grafting.groups": ("mix_names", "parameter_groups"),
        "headloom.lab.compare": ("compare",),
        "headloom.lab.study": ("Study",),
        "headloom.mechanism": [
            "Attention",
            "Maps",
            "attention",
            "foldable",
            "make_config",
            "maps",
            "mechanisms",
            "register",
        ],
        "headloom.mechanism.schedules": ("schedule", "schedules"),
        "headloom.ops.bit": ("pack_bits",),
        "headloom.ops.cache": ("Cache",),
        "headloom.ops.masks": ("Causal", "Dense", "Documents", "Exactly", "Padding", "Window"),
    },
)

_hook.install()
