"""Llama: q, k, v, o projections with one bias switch, half-split rotary over the whole head, causal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from headloom.core.errors import HeadloomError
from headloom.hf.family import Family
from headloom.hf.rope import from_parameters


class Llama(Family):
    name = "llama"

    def config_class(self) -> Any:
        from transformers.models.llama.configuration_llama import LlamaConfig

        return LlamaConfig

    def attention_class(self) -> type:
        from transformers.models.llama.modeling_llama import LlamaAttention

        return LlamaAttention

    def head_classes(self) -> dict[str, type]:
        from transformers.models.llama.modeling_llama import LlamaForCausalLM

        return {"AutoModelForCausalLM": LlamaForCausalLM}

    def layers(self, model: Any) -> nn.ModuleList:
        return model.model.layers

    def common(self, config: Any, index: int) -> dict[str, Any]:
        rope_theta, rope_scaling = from_parameters(config.rope_parameters, config.max_position_embeddings)
        return {
            "hidden_size": config.hidden_size,
            "num_heads": config.num_attention_heads,
            "num_kv_heads": config.num_key_value_heads,
            "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
            "causal": True,
            "window": None,
            "dropout": float(config.attention_dropout or 0.0),
            "qkv_bias": getattr(config, "attention_bias", False),
            "out_bias": getattr(config, "attention_bias", False),
            "norm_eps": config.rms_norm_eps,
            "rope_theta": rope_theta,
            "rope_scaling": rope_scaling,
        }

    def own_config(
        self, sizes: dict[str, Any], windows: Sequence[int | None], experts: Mapping[str, int]
    ) -> dict[str, Any]:
        if experts:
            given = ", ".join(f"{name}={value}" for name, value in experts.items())
            raise HeadloomError(f"a llama model has one feed-forward a layer, came {given}: use family='mixtral'")
        widths = {w for w in windows if w is not None}
        if len(widths) != 1:
            return sizes  # none; or several, of which a config can say only one: the cache then keeps everything
        if None not in windows:
            return {**sizes, "sliding_window": widths.pop()}
        kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
        return {**sizes, "sliding_window": widths.pop(), "layer_types": kinds}


FAMILY = Llama()
