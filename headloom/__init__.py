"""Headloom: more attention heads from the same parameters, and an honest account of whether they paid.

    import headloom as hl
    attn = hl.attention("iha", hidden_size=256, num_heads=8, num_kv_heads=2, pseudo_heads=4)
    out_BTD = attn(x_BTD)

Names are loaded when first used: `import headloom` itself is light. After it, transformers' `AutoConfig` and
`AutoModelForCausalLM` know saved headloom models.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
    from headloom.mechanism import (
        Attention,
        AttentionConfig,
        Maps,
        attention,
        foldable,
        make_config,
        maps,
        mechanisms,
        register,
    )
    from headloom.mechanism.bilinear import BilinearConfig
    from headloom.mechanism.deltaformer import DeltaFormerConfig
    from headloom.mechanism.diff import DiffConfig
    from headloom.mechanism.diff2 import Diff2Config
    from headloom.mechanism.gqa import GQAConfig
    from headloom.mechanism.iha import IHAConfig
    from headloom.mechanism.linear import LinearConfig
    from headloom.mechanism.mfa import MFAConfig
    from headloom.mechanism.mfa_kr import MFAKRConfig
    from headloom.mechanism.mha import MHAConfig
    from headloom.mechanism.mla import MLAConfig
    from headloom.mechanism.mqa import MQAConfig
    from headloom.mechanism.sas import SASConfig
    from headloom.mechanism.schedules import schedule, schedules
    from headloom.mechanism.simplicial import SimplicialConfig
    from headloom.mechanism.talking_heads import TalkingHeadsConfig
    from headloom.mechanism.tpa import TPAConfig
    from headloom.ops.bit import pack_bits
    from headloom.ops.cache import Cache
    from headloom.ops.masks import Causal, Dense, Documents, Exactly, Padding, Window


def _config_class(name: str) -> Any:
    """The config class of a registered mechanism, by its name: `hl.IHAConfig`, and a new mechanism's without a line
    here (type checkers see those imported above)."""
    if name.endswith("Config"):
        from headloom.mechanism import mechanisms

        for info in mechanisms().values():
            if info.config_cls.__name__ == name:
                return info.config_cls
    raise AttributeError(f"module 'headloom' has no attribute {name!r}")


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
            "AttentionConfig",
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
    _config_class,
)

_hook.install()
