"""BERT: an encoder with learned positions; its output projection, `attention.output.dense`, is not in the attention."""

from __future__ import annotations

from typing import Any

from torch import nn

from headloom.core.errors import HeadloomError
from headloom.hf.model.family import Encoder
from headloom.hf.model.layouts import Separate


class Bert(Encoder):
    name = "bert"
    attention = "BertSelfAttention"
    layers_path = "encoder.layer"
    attention_path = "attention.self"
    layout = Separate(q="query", k="key", v="value", out=None)

    def output_of(self, layer: nn.Module) -> Any:
        return layer.get_submodule("attention.output.dense")

    def common(self, config: Any, index: int) -> dict[str, Any]:
        for switch in ("is_decoder", "add_cross_attention"):
            if getattr(config, switch):
                raise HeadloomError(f"a {self.name} model with {switch}=True cannot be grafted: encoders can")
        positions = getattr(config, "position_embedding_type", None) or "absolute"
        if positions != "absolute":
            raise HeadloomError(
                f"a {self.name} model with position_embedding_type='{positions}' cannot be grafted: "
                "relative positions add to the scores"
            )
        return {
            **super().common(config, index),
            "dropout": float(config.attention_probs_dropout_prob),
            "qkv_bias": True,
            "out_bias": True,
            "rope_theta": None,
        }


FAMILY = Bert()
