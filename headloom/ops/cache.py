"""The cache: named slots that grow along the token axis or are constant, and what the masks need of each token."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """Everything one layer remembers, this call's tokens last.

    slots: name -> (B, heads, S, width); positions_BS: ints (1 or B, S); documents_BS: ints (B, S), -1 = padding, or
    None when every token is real and of one document.

    tokens: how many tokens were seen, where a constant state stands for them: positions and documents are then not
    those of tokens but of the slots' rows (of the last real token, in a cache).
    """

    slots: dict[str, Tensor]
    positions_BS: Tensor
    documents_BS: Tensor | None = None
    tokens: int | None = None


class Cache:
    """Keys, values (or whatever a mechanism remembers) of the tokens seen, by layer.

    >>> cache = Cache()
    >>> cache.length(0)
    0
    """

    def __init__(self) -> None:
        self.layers: dict[int, Seen] = {}

    def length(self, layer: int = 0) -> int:
        """Tokens seen by a layer."""
        if layer not in self.layers:
            return 0
        seen = self.layers[layer]
        return seen.positions_BS.shape[-1] if seen.tokens is None else seen.tokens

    def held(self, layer: int = 0) -> Seen | None:
        """All that a layer remembers, or None before its first call."""
        return self.layers.get(layer)

    def peek(self, layer: int, new: Seen) -> Seen:
        """What the layer would remember after `new`, without remembering it."""
        old = self.layers.get(layer)
        if old is None:
            return new
        slots = {name: torch.cat((old.slots[name], value), 2) for name, value in new.slots.items()}
        batch = max(old.positions_BS.shape[0], new.positions_BS.shape[0])
        positions = (old.positions_BS.expand(batch, -1), new.positions_BS.expand(batch, -1))
        documents = None
        if old.documents_BS is not None or new.documents_BS is not None:
            rows = next(iter(new.slots.values())).shape[0]
            documents = torch.cat([_documents(part, rows) for part in (old, new)], 1)
        return Seen(slots, torch.cat(positions, 1), documents)

    def append(self, layer: int, new: Seen) -> Seen:
        """Remember this call's tokens; returns everything remembered."""
        self.layers[layer] = self.peek(layer, new)
        return self.layers[layer]

    def replace(self, layer: int, state: Seen) -> None:
        """Remember a constant state in the place of the one before; it says how many tokens it has seen."""
        assert state.tokens is not None
        self.layers[layer] = state

    def nbytes(self) -> int:
        """Bytes of all slots (positions and documents, a few bytes per token, are not counted)."""
        return sum(x.numel() * x.element_size() for layer in self.layers.values() for x in layer.slots.values())

    def __repr__(self) -> str:
        tokens = max(map(self.length, self.layers), default=0)
        return f"Cache({len(self.layers)} layers, {tokens} tokens, {self.nbytes()} bytes)"


def _documents(seen: Seen, batch: int) -> Tensor:
    if seen.documents_BS is not None:
        return seen.documents_BS
    positions = seen.positions_BS
    return torch.zeros(batch, positions.shape[1], dtype=torch.long, device=positions.device)
