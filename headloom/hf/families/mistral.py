"""Mistral: Llama's attention without biases, one window for all layers."""

from __future__ import annotations

from typing import Any

from headloom.hf.model.family import Decoder


class Mistral(Decoder):
    name = "mistral"
    attention = "MistralAttention"

    def window(self, config: Any, index: int) -> int | None:
        return config.sliding_window


FAMILY = Mistral()
