"""Gemma 3, the text model: q and k normalised per head, windows and rotary frequencies by the layer's type."""

from __future__ import annotations

from typing import Any, ClassVar

from headloom.hf.model.family import Decoder
from headloom.hf.model.layouts import Separate


class Gemma3(Decoder):
    name = "gemma3_text"
    attention = "Gemma3Attention"
    layout = Separate(norm="head")
    head_dim_names: ClassVar[tuple[str, ...]] = ("query_pre_attn_scalar",)
    refused: ClassVar[dict[str, str]] = {
        "gemma3": "image tokens see each other both ways, by masks of its own. Load the text model alone "
        "(AutoModelForCausalLM of a 'gemma3_text' checkpoint)"
    }

    def common(self, config: Any, index: int) -> dict[str, Any]:
        return {
            **super().common(config, index),
            "scale": config.query_pre_attn_scalar**-0.5,  # no soft-cap: its attention does not apply the config's
        }

    def causal(self, config: Any) -> bool:
        return not config.use_bidirectional_attention

    def rope(self, config: Any, index: int) -> dict[str, Any]:
        return config.rope_parameters[config.layer_types[index]]


FAMILY = Gemma3()
