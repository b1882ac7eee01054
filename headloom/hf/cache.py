"""A transformers `Cache` with the interface of `hl.Cache`.

Towards transformers a mechanism's growing slots become two tensors of one head count with the token axis third, so
that dynamic, static, sliding and quantized caches store them as they would keys and values. A base cache ("k" of G
heads by K, "v" of G heads by V) passes through unchanged: an IHA model's cache is exactly the original's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError
from headloom.ops.cache import Cache, Seen

Slots = dict[str, Tensor]
Shape = tuple[int, int]

PACKED = "headloom_packed"
"""Set on a transformers cache that holds packed documents: it stores no document ids, so it cannot be continued."""

DECODE_PACKED = (
    "packed documents cannot be continued from a transformers cache: it holds no document ids. "
    "Decode one document at a time (left-padded batches work), or use hl.attention with hl.Cache"
)


def pack(slots: Slots) -> tuple[Tensor, Tensor]:
    """Slots (B, heads, T, width) -> two tensors (B, n, T, w1), (B, n, T, w2) of one head count n.

    Two slots of equal head count pass as they are. Otherwise the first half of the slots goes into the first tensor
    and the rest into the second, heads flattened into one; a single slot is cut in the middle of its width.
    """
    values = list(slots.values())
    if len(values) == 2 and values[0].shape[1] == values[1].shape[1]:
        return values[0], values[1]
    flat = [v.transpose(1, 2).flatten(2)[:, None] for v in values]
    if len(flat) == 1:
        middle = flat[0].shape[-1] // 2
        return flat[0][..., :middle], flat[0][..., middle:]
    half = (len(flat) + 1) // 2
    return torch.cat(flat[:half], -1), torch.cat(flat[half:], -1)


def unpack(first: Tensor, second: Tensor, shapes: dict[str, Shape]) -> Slots:
    """The inverse of `pack`: `shapes` names each slot's (heads, width)."""
    names = list(shapes)
    if len(names) == 2 and shapes[names[0]][0] == shapes[names[1]][0]:
        return {names[0]: first, names[1]: second}
    if len(names) == 1:
        groups = [(torch.cat([first, second], -1), names)]
    else:
        half = (len(names) + 1) // 2
        groups = [(first, names[:half]), (second, names[half:])]
    out: Slots = {}
    for tensor, members in groups:
        widths = [shapes[name][0] * shapes[name][1] for name in members]
        for name, part in zip(members, tensor[:, 0].split(widths, -1), strict=True):
            out[name] = part.unflatten(-1, shapes[name]).transpose(1, 2)
    return out


class HFCache(Cache):
    """One layer's view of a transformers cache.

    Positions of cached tokens are not stored by transformers: they are counted back from this call's first position.
    Which cached tokens are padding is said by the mask of each call, which covers them.
    """

    def __init__(self, cache: Any):
        self.cache = cache

    def _stored(self, layer: int) -> Any:
        layers = self.cache.layers
        return layers[layer] if layer < len(layers) else None

    def tokens(self, layer: int) -> int:
        """Tokens seen so far, those a window has dropped included."""
        return int(self.cache.get_seq_length(layer))

    def is_static(self, layer: int) -> bool:
        """Whether the layer hands out its whole room, written or not."""
        return getattr(self._stored(layer), "max_cache_len", None) is not None

    def length(self, layer: int = 0) -> int:
        """Cached tokens that the queries of the next call are given: a sliding layer hands out its last W - 1."""
        stored, seen = self._stored(layer), self.tokens(layer)
        if not getattr(stored, "is_sliding", False):
            return seen
        window = getattr(stored, "sliding_window", None) or stored.max_cache_len
        return min(seen, int(window) - 1)

    def held(self, layer: int = 0) -> Seen | None:
        return None

    def append(self, layer: int, new: Seen) -> Seen:
        past = self._continue(layer, new)
        keys, values = self.cache.update(*pack(new.slots), layer)
        S = past + new.positions_BS.shape[-1]
        # a static layer hands out its whole room, of which the unwritten end is cut off; the last S are the others'
        used = slice(None, S) if self.is_static(layer) else slice(keys.shape[2] - S, None)
        return _seen(keys[:, :, used], values[:, :, used], new, past)

    def peek(self, layer: int, new: Seen) -> Seen:
        past = self._continue(layer, new)
        keys, values = pack(new.slots)
        if past:
            stored = self._stored(layer)
            if not isinstance(stored.keys, Tensor):
                raise HeadloomError(f"a {type(stored).__name__} cannot be read without being written")
            last = min(self.tokens(layer), stored.keys.shape[-2])
            keys = torch.cat((stored.keys[:, :, last - past : last], keys), 2)
            values = torch.cat((stored.values[:, :, last - past : last], values), 2)
        return _seen(keys, values, new, past)

    def _continue(self, layer: int, new: Seen) -> int:
        """The cached tokens before this call, once it is sure that none of them is of another document."""
        past, documents = self.length(layer), new.documents_BS
        if past and getattr(self.cache, PACKED, False):
            raise HeadloomError(DECODE_PACKED)
        if documents is None or documents.shape[1] == 1 or torch.compiler.is_compiling():
            return past
        if bool((documents > 0).any()):
            if past:
                raise HeadloomError(DECODE_PACKED)
            setattr(self.cache, PACKED, True)
        return past

    def nbytes(self) -> int:
        pairs = ((layer.keys, layer.values) for layer in self.cache.layers if layer.is_initialized)
        return sum(x.numel() * x.element_size() for pair in pairs for x in pair)

    def __repr__(self) -> str:
        return f"HFCache({self.cache!r})"


def _seen(keys: Tensor, values: Tensor, new: Seen, past: int) -> Seen:
    """What was stored, as slots."""
    shapes = {name: (value.shape[1], value.shape[3]) for name, value in new.slots.items()}
    positions, documents = new.positions_BS, new.documents_BS
    if past:
        back = torch.arange(-past, 0, device=positions.device)
        positions, documents = torch.cat((positions[:, :1] + back, positions), 1), None
    return Seen(unpack(keys, values, shapes), positions, documents)
