"""Headloom: more attention heads from the same parameters, and an honest account of whether they paid.

    import headloom as hl
    attn = hl.attention("iha", hidden_size=256, num_heads=8, num_kv_heads=2, pseudo_heads=4)
    out_BTD = attn(x_BTD)

Names are loaded when first used: `import headloom` itself is light. After it, transformers' `AutoConfig` and
`AutoModelForCausalLM` know saved headloom models.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from headloom import _hook

# what each name is for type checkers; `_PLACES` says where it is loaded from
__version__ = "0.1.0"

if TYPE_CHECKING:
    from headloom.core.errors import HeadloomError, RunError
    from headloom.costs.count import cost
    from headloom.hf import build_model, fold, graft, mix_names, parameter_groups
    from headloom.lab.compare import compare
    from headloom.lab.study import Study
    from headloom.mechanism import Attention, Maps, attention, foldable, make_config, maps, mechanisms, register
    from headloom.mechanism.schedules import schedule, schedules
    from headloom.ops.bit import pack_bits
    from headloom.ops.cache import Cache
    from headloom.ops.masks import Causal, Dense, Documents, Exactly, Padding, Window

_PLACES = {
    **dict.fromkeys(
        ("Attention", "Maps", "attention", "foldable", "maps", "make_config"), ("headloom.mechanism", None)
    ),
    **dict.fromkeys(("mechanisms", "register"), ("headloom.mechanism", None)),
    **dict.fromkeys(("schedule", "schedules"), ("headloom.mechanism.schedules", None)),
    "cost": ("headloom.costs.count", None),
    **dict.fromkeys(("HeadloomError", "RunError"), ("headloom.core.errors", None)),
    **dict.fromkeys(("build_model", "fold", "graft", "mix_names", "parameter_groups"), ("headloom.hf", None)),
    "compare": ("headloom.lab.compare", None),
    "Study": ("headloom.lab.study", None),
    "pack_bits": ("headloom.ops.bit", None),
    "Cache": ("headloom.ops.cache", None),
    **dict.fromkeys(("Causal", "Dense", "Documents", "Exactly", "Padding", "Window"), ("headloom.ops.masks", None)),
}

__all__ = [*_PLACES, "__version__"]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'headloom' has no attribute '{name}'")
    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)


_hook.install()
