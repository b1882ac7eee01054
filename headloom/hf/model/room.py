"""A static cache inside a compiled call, read so that one compiled graph serves every decoded token.

A static layer returns all of its places, filled from the front. How many are filled is a tensor, which a compiler
cannot turn into a shape; so here the places are rolled until this call's tokens stand last. What a mechanism sees then
has one shape for every token, and order, windows and pseudo-tokens are counted from the end as always. The places in
front that nothing has been written to are hidden. The price is a copy of the layer's keys and values a call, which is
what a growing cache pays too; an eager call cuts the room instead (`HFCache`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headloom.hf.model.cache import UNWRITTEN, HFCache, as_pair, check_width
from headloom.hf.model.masks import arriving
from headloom.ops.cache import Seen
from headloom.ops.masks import Dense, Mask, refuse


def view_of(cache: Any, layer: int, T: int) -> HFCache:
    """The view of a transformers cache for one layer's call with T tokens."""
    view = HFCache(cache)
    return WholeRoom(cache, layer, T) if torch.compiler.is_compiling() and view.is_static(layer) else view


class WholeRoom(HFCache):
    """A static layer in a call with T tokens, read as S places of which the last T hold this call's tokens."""

    def __init__(self, cache: Any, layer: int, T: int):
        super().__init__(cache)
        stored = self._stored(layer)
        self.layer, self.T, self.S = layer, T, stored.get_mask_sizes(T)[0]
        # a window that this call fills or has filled is handed out in order and without unwritten places
        self.in_order = stored.is_sliding and stored.cumulative_length_int + T > stored.max_cache_len
        past = stored.cumulative_length_int if self.in_order else stored.cumulative_length
        self.places = torch.arange(self.S, device=getattr(stored, "device", None))
        self.index = self.places + (past + T - self.S)  # of the tokens at the S places; negative: not written yet
        self.filled = min(past, stored.max_cache_len) if self.in_order else None

    def length(self, layer: int = 0) -> int:
        return self.S - self.T

    def arriving(self, mask: Any, layer: int, T: int, *, exact: bool = False) -> Mask | None:
        joined = arriving(mask, self.S - T, T, cut=self._columns_of_room if exact else self._cut, exact=exact)
        if not self.in_order:
            written = Dense((self.index >= 0).expand(1, T, -1))
            joined = written if joined is None else joined & written
        return self._note(joined, exact)

    def _columns_of_room(self, visible: Tensor) -> Tensor:
        check_width(visible, self.S, self.layer)
        if not self.in_order:
            refuse((visible & (self.places > self.index[-1])).any(), UNWRITTEN)
        return self._cut(visible)

    def _cut(self, values: Tensor) -> Tensor:
        """Columns stand for tokens from the first one on, unless they are this window's own."""
        if self.in_order and values.shape[-1] == self.S:
            return values
        return values.index_select(-1, self.index.clamp(min=0))

    def append(self, layer: int, new: Seen) -> Seen:
        keys, values = (self._turn(x) for x in self.cache.update(*as_pair(new.slots), layer))
        return self.seen(keys, values, new, self.S - self.T)

    def peek(self, layer: int, new: Seen) -> Seen:
        stored, pair = self._stored(layer), as_pair(new.slots)
        if not stored.is_initialized:
            stored.lazy_initialization(*pair)
        keys, values = (
            torch.cat((self._before(old), x), 2) for old, x in zip((stored.keys, stored.values), pair, strict=True)
        )
        return self.seen(keys, values, new, self.S - self.T)

    def _turn(self, x: Tensor) -> Tensor:
        return x if self.in_order else x.index_select(2, self.index % self.S)

    def _before(self, x: Tensor) -> Tensor:
        """What stands at the S - T places before this call's."""
        if self.in_order:
            return x[:, :, : self.filled][:, :, -(self.S - self.T) :] if self.S > self.T else x[:, :, :0]
        return x.index_select(2, (self.index % self.S)[: self.S - self.T])
