"""ModernBERT: an encoder with one projection for q, k and v; windows and rotary frequencies by the layer's type."""

from __future__ import annotations

from typing import Any

from headloom.hf.model.family import Encoder
from headloom.hf.model.layouts import Fused
from headloom.hf.model.rope import FamilyRotary, from_parameters


class SingleRotary(FamilyRotary):
    """Tables rounded to the model's type; rotation in float32, in a float64 model too."""

    wide, single = True, True


class ModernBert(Encoder):
    name = "modernbert"
    attention = "ModernBertAttention"
    attention_path = "attn"
    layout = Fused(qkv="Wqkv", out="Wo", dropout="out_drop")
    rotary = SingleRotary
    passes_positions = False

    def common(self, config: Any, index: int) -> dict[str, Any]:
        kind = config.layer_types[index]
        rope_theta, rope_scaling = from_parameters(config.rope_parameters[kind], config.max_position_embeddings)
        return {
            **super().common(config, index),
            # theirs includes both ends, |q - k| <= local_attention / 2; ours is |q - k| < window
            "window": config.sliding_window + 1 if kind == "sliding_attention" else None,
            "dropout": float(config.attention_dropout),
            "qkv_bias": config.attention_bias,
            "out_bias": config.attention_bias,
            "rope_theta": rope_theta,
            "rope_scaling": rope_scaling,
        }


FAMILY = ModernBert()
