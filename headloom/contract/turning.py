"""The rotary embedding within the dataflow: when keys are rotated, and by what."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from headloom.contract.bases import Base
from headloom.contract.layer import C_co, Layer
from headloom.ops.rotary import Rotary, rotate


class Turning(Layer[C_co]):
    """Rotation by position, of what has its rotated features first.

    Keys are rotated before they are remembered, so that a cached key is never touched again, unless the frequencies
    change as the sequence grows: then the cache keeps them as they are, and reading rotates them.
    """

    base: Base[Any]
    #: None: no rotary embedding
    rotary: Rotary | None

    def tables(self, positions: Tensor, x: Tensor, length: int | None) -> tuple[Tensor, Tensor]:
        """cos and sin (*positions.shape, rotary_dim) for the rotated features of x at `positions`."""
        assert self.rotary is not None
        return self.rotary.tables(positions, x.dtype, length=length)

    def turn(self, x_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        """x (B, heads, T, K) rotated by positions (1 or B, T); length: tokens so far, where the frequencies need it."""
        if self.rotary is None:
            return x_BHTK
        return rotate(x_BHTK, self.tables(positions_BT, x_BHTK, length))

    @property
    def turns_late(self) -> bool:
        """Whether keys are remembered unrotated: reading them then needs the positions of cached tokens."""
        return self.rotary is not None and self.rotary.length_dependent

    def turn_early(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        """Rotate the base's slot before remembering, unless the frequencies change as the sequence grows."""
        if self.rotary is None or self.rotary.length_dependent:
            return slots
        turned = self.base.turned
        return {**slots, turned: self.turn(slots[turned], positions_BT, None)}

    def turn_late(self, slots: dict[str, Tensor], positions_BS: Tensor, length: int | None) -> dict[str, Tensor]:
        """Rotate what `turn_early` had to leave."""
        if length is None:
            return slots
        turned = self.base.turned
        return {**slots, turned: self.turn(slots[turned], positions_BS, length)}
