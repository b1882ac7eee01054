"""Qwen2: biases on q, k and v but not on o; windows by layer."""

from __future__ import annotations

from typing import Any

from headloom.hf.model.family import Decoder


class Qwen2(Decoder):
    name = "qwen2"
    attention = "Qwen2Attention"

    def common(self, config: Any, index: int) -> dict[str, Any]:
        return {**super().common(config, index), "qkv_bias": True}


FAMILY = Qwen2()
