"""GPT-2: one Conv1D for q, k and v, learned positions, output dropout inside the attention."""

from __future__ import annotations

from typing import Any, ClassVar

from headloom.core.errors import HeadloomError
from headloom.hf.model.family import Family
from headloom.hf.model.layouts import Fused


class GPT2(Family):
    name = "gpt2"
    attention = "GPT2Attention"
    layers_path = "h"
    attention_path = "attn"
    layout = Fused(qkv="c_attn", out="c_proj", dropout="resid_dropout", conv1d=True)
    size_names: ClassVar[dict[str, str]] = {"intermediate_size": "n_inner"}

    def feed_forward_width(self, config: Any) -> int:
        return config.n_inner or 4 * config.n_embd

    def common(self, config: Any, index: int) -> dict[str, Any]:
        for switch in ("add_cross_attention", "reorder_and_upcast_attn"):
            if getattr(config, switch):
                raise HeadloomError(f"a gpt2 model with {switch}=True cannot be grafted")
        head_dim = config.hidden_size // config.num_attention_heads
        scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            scale /= index + 1
        plain = config.scale_attn_weights and not config.scale_attn_by_inverse_layer_idx
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_attention_heads,
            "head_dim": head_dim,
            "causal": self.causal(config),
            "dropout": float(config.attn_pdrop),
            "qkv_bias": True,
            "out_bias": True,
            "rope_theta": None,
            "scale": None if plain else scale,
        }


FAMILY = GPT2()
