"""Types that operators of our own share: what a call keeps for its backward pass, shapes for FLOP formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

Shape = Sequence[int]
"""Of a tensor, as PyTorch's FLOP counter hands it to a formula."""


class Context(Protocol):
    """PyTorch's context of one call: tensors saved for the backward pass, and the plain arguments beside them."""

    saved_tensors: tuple[Tensor, ...]
    plain: tuple[object, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep these for `saved_tensors`."""
