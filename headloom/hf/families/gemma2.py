"""Gemma 2: scores scaled by `query_pre_attn_scalar` and soft-capped; every other layer has a window."""

from __future__ import annotations

from typing import Any

from headloom.hf.family import Decoder


class Gemma2(Decoder):
    name = "gemma2"
    attention = "Gemma2Attention"

    def common(self, config: Any, index: int) -> dict[str, Any]:
        return {
            **super().common(config, index),
            "causal": not config.use_bidirectional_attention,
            "scale": config.query_pre_attn_scalar**-0.5,
            "softcap": config.attn_logit_softcapping,
        }


FAMILY = Gemma2()
