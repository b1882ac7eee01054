"""OLMo2: queries and keys are normalised over their full width; cos and sin stay float32 in a half-precision model."""

from __future__ import annotations

from typing import Any

from headloom.hf.model.family import Decoder
from headloom.hf.model.layouts import Separate
from headloom.hf.model.rope import FamilyRotary


class WideRotary(FamilyRotary):
    """Float32 tables, never rounded to the model's type."""

    rounded, wide = False, True


class Olmo2(Decoder):
    name = "olmo2"
    attention = "Olmo2Attention"
    layout = Separate(norm="width")
    rotary = WideRotary

    def window(self, config: Any, index: int) -> int | None:
        return None


FAMILY = Olmo2()
