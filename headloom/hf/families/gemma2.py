"""Gemma 2: scores scaled by `query_pre_attn_scalar` and soft-capped; every other layer has a window."""

from __future__ import annotations

from typing import Any, ClassVar

from headloom.core.errors import HeadloomError
from headloom.hf.model.family import Decoder


class Gemma2(Decoder):
    name = "gemma2"
    attention = "Gemma2Attention"
    head_dim_names: ClassVar[tuple[str, ...]] = ("query_pre_attn_scalar",)

    def causal(self, config: Any) -> bool:
        return not config.use_bidirectional_attention

    def common(self, config: Any, index: int) -> dict[str, Any]:
        if config.use_bidirectional_attention:
            raise HeadloomError(
                "a gemma2 model with use_bidirectional_attention=True cannot be grafted: whether it is causal depends "
                "on its attn_implementation"
            )
        return {
            **super().common(config, index),
            "scale": config.query_pre_attn_scalar**-0.5,
            "softcap": config.attn_logit_softcapping,
        }


FAMILY = Gemma2()
