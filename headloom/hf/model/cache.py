"""A transformers `Cache` with the interface of `hl.Cache`.

Towards transformers a mechanism's growing slots become two tensors of one head count with the token axis third, so
that dynamic, static, sliding and quantized caches store them as they would keys and values. A base cache ("k" of G
heads by K, "v" of G heads by V) passes through unchanged: an IHA model's cache is exactly the original's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from headloom.core.errors import HeadloomError
from headloom.hf.model.masks import arriving
from headloom.ops.cache import Cache, Seen
from headloom.ops.masks import Dense, Mask, refuse, sort_rules

Slots = dict[str, Tensor]
Shape = tuple[int, int]

PACKED = "headloom_packed"
"""Set on a transformers cache that holds packed documents: it stores no document ids, so it cannot be continued."""

DECODE_PACKED = (
    "packed documents cannot be continued from a transformers cache: it holds no document ids. "
    "Decode one document at a time (left-padded batches work), or use hl.attention with hl.Cache"
)


FOREIGN = (
    "the cache given holds {found} for layer {layer}, whose attention remembers {wanted}: keys and values made for the "
    "original model (prefix tuning, a cache it filled) cannot be read. Choose options that remember these "
    "(cache='base' where the mechanism has it), tune projections (LoRA) or prompts (prompt tuning), or start with an "
    "empty cache"
)
UNWRITTEN = "the 4-D mask shows places of the cache that no token stands at: hide them"


def as_pair(slots: Slots) -> tuple[Tensor, Tensor]:
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


def from_pair(first: Tensor, second: Tensor, shapes: dict[str, Shape]) -> Slots:
    """The inverse of `as_pair`: `shapes` names each slot's (heads, width)."""
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


class ConstantLayer(CacheLayerMixin):
    """One layer's state of constant size in a transformers cache (linear attention). It counts the tokens it has seen.

    Methods are those of transformers' `CacheLayerMixin`; the rows of a batch are reordered and repeated as beams ask.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen | None = None

    def hold(self, seen: Seen) -> None:
        """Take the place of the state so far."""
        self.seen, self.is_initialized = seen, True
        self.dtype, self.device = next(iter(seen.slots.values())).dtype, seen.positions_BS.device

    def nbytes(self) -> int:
        """Bytes of the state."""
        return 0 if self.seen is None else sum(x.numel() * x.element_size() for x in self.seen.slots.values())

    def get_seq_length(self) -> int:
        return 0 if self.seen is None or self.seen.tokens is None else self.seen.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: `hold` gives the state."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Raises HeadloomError: there is no place for keys and values."""
        raise HeadloomError("this layer remembers a state of constant size and takes no keys and values")

    def crop(self, *args: Any, **kwargs: Any) -> None:
        """Raises HeadloomError: the state is of all tokens together."""
        raise HeadloomError(
            "a state of constant size cannot be cropped: it holds no single tokens. Decode without assisted generation"
        )

    def reset(self) -> None:
        self.seen, self.is_initialized = None, False

    def _rows(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.seen is None:
            return
        slots = {name: change(x) for name, x in self.seen.slots.items()}
        batch = next(iter(self.seen.slots.values())).shape[0]
        documents = None if self.seen.documents_BS is None else change(self.seen.documents_BS)
        positions = change(self.seen.positions_BS.expand(batch, -1))
        self.seen = Seen(slots, positions, documents, self.seen.tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._rows(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._rows(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._rows(lambda x: x[indices])

    def offload(self) -> None:
        self._rows(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        self._rows(lambda x: x.to(self.device, non_blocking=True))


class HFCache(Cache):
    """One layer's view of a transformers cache.

    Positions of cached tokens are not stored by transformers: they are counted back from this call's first position.
    Which cached tokens are padding is said by the mask of each call, which covers them.
    """

    def __init__(self, cache: Any):
        self.cache = cache
        self.exact = False
        self.real: Tensor | None = None  # of the tokens looked at (1 or B, S): those that are no padding
        self.apart: Tensor | bool = False  # a caller's mask shows its queries different cached tokens

    def _stored(self, layer: int) -> Any:
        layers = self.cache.layers
        return layers[layer] if layer < len(layers) else None

    def tokens(self, layer: int) -> int:
        """Tokens seen so far, those a window has dropped included."""
        return int(self.cache.get_seq_length(layer))

    def is_static(self, layer: int) -> bool:
        """Whether the layer returns all of its places, written or not."""
        return getattr(self._stored(layer), "max_cache_len", None) is not None

    def length(self, layer: int = 0) -> int:
        """Cached tokens that the queries of the next call are given: a sliding layer hands out its last W - 1."""
        stored, seen = self._stored(layer), self.tokens(layer)
        if not getattr(stored, "is_sliding", False):
            return seen
        window = getattr(stored, "sliding_window", None) or stored.max_cache_len
        return min(seen, int(window) - 1)

    def arriving(self, mask: Any, layer: int, T: int, *, exact: bool = False) -> Mask | None:
        """A mask in any form, of a call with T tokens, as one of ours over the tokens that the layer sees. `exact`: a
        4-D mask is the caller's, with a column for each key that transformers' own layer would look at."""
        past, seen = self.length(layer), self.tokens(layer) + T
        S = past + T  # a static cache's mask covers its room, which goes on behind this call
        cut: Callable[[Tensor], Tensor] | None = None
        if exact:
            cut = functools.partial(self._columns, layer, T, seen - S, S)
        elif self.is_static(layer):
            cut = lambda x: x if x.shape[-1] == S else x[..., seen - S : seen]  # noqa: E731
        return self._note(arriving(mask, past, T, cut=cut, exact=exact), exact)

    def _note(self, mask: Mask | None, exact: bool) -> Mask | None:
        """Remember which tokens a mask shows as real: the positions of cached tokens are counted by it."""
        self.exact = exact
        rules = sort_rules(mask, causal=False, window=None)
        self.real = rules.padding
        for part in rules.pairs if self.real is None else ():
            if isinstance(part, Dense):  # padding is what no query sees
                seen = part.values.any(1)
                self.real = seen if self.real is None else self.real & seen
                cached = part.values[..., : part.values.shape[2] - part.values.shape[1]]
                self.apart = (cached != cached[:, :1]).any() if exact else False
        return mask

    def _columns(self, layer: int, T: int, start: int, S: int, visible: Tensor) -> Tensor:
        """The columns of the S tokens from `start` on, in a mask over what the stored layer hands out."""
        stored = self._stored(layer)
        width, offset = (T, 0) if stored is None else stored.get_mask_sizes(T)
        check_width(visible, width, layer)
        first = start - offset
        beside = torch.cat((visible[..., :first], visible[..., first + S :]), -1)
        refuse(beside.any(), UNWRITTEN)
        return visible[..., first : first + S]

    def held(self, layer: int = 0) -> Seen | None:
        stored = self._stored(layer)
        return stored.seen if isinstance(stored, ConstantLayer) else None

    def replace(self, layer: int, state: Seen) -> None:
        layers = self.cache.layers
        while len(layers) <= layer and self.cache.layer_class_to_replicate is not None:
            layers.append(self.cache.layer_class_to_replicate())
        if not isinstance(layers[layer], ConstantLayer):
            if type(layers[layer]) is not DynamicLayer:
                raise HeadloomError(
                    f"a state of constant size cannot be kept in a {type(layers[layer]).__name__} of a "
                    f"{type(self.cache).__name__}: leave cache_implementation at its default (dynamic)"
                )
            if self.tokens(layer):
                held = f"the keys and values of {self.tokens(layer)} tokens"
                raise HeadloomError(FOREIGN.format(layer=layer, found=held, wanted="a state of constant size"))
            layers[layer] = ConstantLayer()
        layers[layer].hold(state)

    def append(self, layer: int, new: Seen) -> Seen:
        pair = as_pair(new.slots)
        past = self._continue(layer, new, pair)
        keys, values = self.cache.update(*pair, layer)
        S = past + new.positions_BS.shape[-1]
        # a static layer hands out its whole room, of which the unwritten end is cut off; the last S are the others'
        used = slice(None, S) if self.is_static(layer) else slice(keys.shape[2] - S, None)
        return self.seen(keys[:, :, used], values[:, :, used], new, past)

    def peek(self, layer: int, new: Seen) -> Seen:
        keys, values = as_pair(new.slots)
        past = self._continue(layer, new, (keys, values))
        if past:
            stored = self._stored(layer)
            if not isinstance(stored.keys, Tensor):
                raise HeadloomError(f"a {type(stored).__name__} cannot be read without being written")
            last = min(self.tokens(layer), stored.keys.shape[-2])
            keys = torch.cat((stored.keys[:, :, last - past : last], keys), 2)
            values = torch.cat((stored.values[:, :, last - past : last], values), 2)
        return self.seen(keys, values, new, past)

    def seen(self, keys: Tensor, values: Tensor, new: Seen, past: int) -> Seen:
        """What was stored, as slots: `past` cached tokens, then this call's."""
        shapes = {name: (value.shape[1], value.shape[3]) for name, value in new.slots.items()}
        positions, documents = new.positions_BS, new.documents_BS
        if past:
            positions, documents = torch.cat(self._positions(positions, past), 1), None
        return Seen(from_pair(keys, values, shapes), positions, documents)

    def _positions(self, positions: Tensor, past: int) -> tuple[Tensor, Tensor]:
        """(positions of the cached tokens, of this call's): the first are counted back over tokens that are no
        padding, from this call's first such token."""
        if self.real is None:
            return positions[:, :1] + torch.arange(-past, 0, device=positions.device), positions
        rows = max(self.real.shape[0], positions.shape[0])
        positions, real = positions.expand(rows, -1), self.real.expand(rows, -1).to(positions)
        first = positions.gather(1, real[:, past:].argmax(1, keepdim=True))
        return first - real[:, :past].flip(1).cumsum(1).flip(1), positions

    def _continue(self, layer: int, new: Seen, pair: tuple[Tensor, Tensor]) -> int:
        """The number of cached tokens that this call continues. `pair`: how this attention stores its new ones.

        Raises: HeadloomError for keys and values that another attention stored, and for another document's.
        """
        past, documents = self.length(layer), new.documents_BS
        if past:
            self._check_own(layer, pair)
        if past and getattr(self.cache, PACKED, False) and not self.exact:
            raise HeadloomError(DECODE_PACKED)
        if documents is None or documents.shape[1] == 1 or torch.compiler.is_compiling():
            return past
        if bool((documents > 0).any()):
            if past:
                raise HeadloomError(DECODE_PACKED)
            setattr(self.cache, PACKED, True)
        return past

    def _check_own(self, layer: int, pair: tuple[Tensor, Tensor]) -> None:
        stored = self._stored(layer)
        held = (getattr(stored, "keys", None), getattr(stored, "values", None))
        found = [(x.shape[1], x.shape[3]) for x in held if isinstance(x, Tensor) and x.dim() == 4]
        wanted = [(x.shape[1], x.shape[3]) for x in pair]
        if len(found) == 2 and found != wanted:
            told = (" and ".join(f"{n} heads of width {width}" for n, width in shapes) for shapes in (found, wanted))
            raise HeadloomError(FOREIGN.format(layer=layer, found=next(told), wanted=next(told)))

    def nbytes(self) -> int:
        return sum(
            layer.nbytes()
            if isinstance(layer, ConstantLayer)
            else sum(x.numel() * x.element_size() for x in _held(layer))
            for layer in self.cache.layers
        )

    def __repr__(self) -> str:
        return f"HFCache({self.cache!r})"


def check_width(visible: Tensor, width: int, layer: int) -> None:
    """Raise HeadloomError for a caller's mask over other keys than those that a layer's cache returns."""
    if visible.shape[-1] != width:
        raise HeadloomError(
            f"the 4-D mask covers {visible.shape[-1]} keys, layer {layer} looks at {width} (those that its cache keeps "
            f"and this call's): give a mask of {width}, or a dict of masks where kinds of layers differ"
        )


def _held(layer: Any) -> list[Tensor]:
    """The tensors of a layer's keys and values; quantized ones are packed, beside their scales, by each package."""
    pending = [vars(layer).get(name) for name in ("keys", "values", "_quantized_keys", "_quantized_values")]
    found = []
    while pending:
        x = pending.pop()
        if isinstance(x, tuple):
            pending += x
        elif isinstance(x, dict):
            pending += x.values()
        elif hasattr(x, "__tensor_flatten__"):
            pending += [getattr(x, name) for name in x.__tensor_flatten__()[0]]
        elif isinstance(x, Tensor):
            found.append(x)
    return found
