"""GPT-NeoX (Pythia): one projection, q, k and v of each head together; rotary on the first part of a head."""

from __future__ import annotations

from typing import Any

from headloom.hf.model.family import Family
from headloom.hf.model.layouts import Fused
from headloom.hf.model.rope import from_parameters


class GPTNeoX(Family):
    name = "gpt_neox"
    attention = "GPTNeoXAttention"
    attention_path = "attention"
    layout = Fused(qkv="query_key_value", out="dense", interleaved=True)

    def common(self, config: Any, index: int) -> dict[str, Any]:
        parameters = config.rope_parameters
        rope_theta, rope_scaling = from_parameters(parameters, config.max_position_embeddings)
        head_dim = config.hidden_size // config.num_attention_heads
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_attention_heads,
            "head_dim": head_dim,
            "causal": self.causal(config),
            "dropout": float(config.attention_dropout),
            "qkv_bias": config.attention_bias,
            "out_bias": config.attention_bias,
            "rope_theta": rope_theta,
            "rotary_dim": int(head_dim * parameters.get("partial_rotary_factor", 1.0)),
            "rope_scaling": rope_scaling,
        }


FAMILY = GPTNeoX()
