"""Qwen3: queries and keys are normalised per head; windows by layer."""

from __future__ import annotations

from headloom.hf.model.family import Decoder
from headloom.hf.model.layouts import Separate


class Qwen3(Decoder):
    name = "qwen3"
    attention = "Qwen3Attention"
    layout = Separate(norm="head")


FAMILY = Qwen3()
