"""Masks as predicates on (document, index), joined with `&` and lowered late.

A token's *index* is its place in its own row counted over the cache and this call; a padding token's document is -1.
`Visibility` is what a joined mask means for one call: T queries, the last of S keys.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError


class Mask:
    """A frozen predicate: may the query at (document, index) see the key at (document, index)?"""

    def visible(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        """Broadcast predicate on indices, True = visible. Shapes (T, 1) and (1, S) give (T, S)."""
        raise TypeError(f"{type(self).__name__} must define visible(query_index, key_index)")

    def parts(self) -> Iterator[Mask]:
        yield self

    def to(self, *args: object, **kwargs: object) -> Mask:
        """The mask with its tensors moved, as `Tensor.to`."""
        return self

    def __and__(self, other: Mask) -> Mask:
        if not isinstance(other, Mask):
            raise HeadloomError(
                f"masks are joined with masks, not with a {type(other).__name__}: give booleans (B, T, S) as hl.Dense"
            )
        return And((*self.parts(), *other.parts()))


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """key index <= query index."""

    def visible(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        return key_index <= query_index


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """|query index - key index| < width, in real tokens; `Causal() & Window(4)` sees 1, 2, 3, 4, 4, ... keys."""

    width: int

    def __post_init__(self) -> None:
        if type(self.width) is not int or self.width < 1:
            raise HeadloomError(f"window must be an int >= 1 (1 = only the token itself), not {self.width!r}")

    def visible(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        return (query_index - key_index).abs() < self.width


@dataclasses.dataclass(frozen=True, eq=False)
class _Data(Mask):
    """A mask that carries a tensor: of this call's tokens, or of all keys (cache and call)."""

    values: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.values, Tensor):
            raise HeadloomError(f"{type(self).__name__} takes a tensor, not a {type(self.values).__name__}")

    def to(self, *args: object, **kwargs: object) -> Mask:
        device = torch.empty(0).to(*args, **kwargs).device  # type: ignore[call-overload]
        return type(self)(self.values.to(device))


class Documents(_Data):
    """Same document. `values`: ints (B, T) or (B, S); -1 marks padding."""


class Padding(_Data):
    """Only real tokens see and are seen. `values`: (B, T) or (B, S), True (or 1) = real."""


class Dense(_Data):
    """A given rule per pair: `values` bool (B or 1, T, S), True = visible. A (B, 1, T, S) mask loses its head axis."""

    def __post_init__(self) -> None:
        super().__post_init__()
        values = self.values
        if values.dtype != torch.bool:
            raise HeadloomError(f"Dense takes a boolean mask (True = visible), not {values.dtype}")
        if values.dim() == 4 and values.shape[1] == 1:
            object.__setattr__(self, "values", values[:, 0])
        elif values.dim() != 3:
            raise HeadloomError(f"Dense takes a mask of shape (B, T, S) or (B, 1, T, S), not {tuple(values.shape)}")


@dataclasses.dataclass(frozen=True, eq=False)
class And(Mask):
    """All of `members`."""

    members: tuple[Mask, ...]

    def parts(self) -> Iterator[Mask]:
        yield from self.members

    def to(self, *args: object, **kwargs: object) -> Mask:
        return And(tuple(m.to(*args, **kwargs) for m in self.members))

    def visible(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        out = self.members[0].visible(query_index, key_index)
        for member in self.members[1:]:
            out = out & member.visible(query_index, key_index)
        return out


@dataclasses.dataclass(frozen=True, eq=False)
class Exactly(Mask):
    """`mask` is all there is: a layer adds nothing to it.

    Other masks only restrict what a layer shows by itself. Under this one the layer's own causality and window are
    off, positions that start again open no documents, and the padding and documents that a cache remembers hide
    nothing: the mask is over the cache and this call. What the caller states beside it, by `&`, `padding=` or
    `documents=`, still holds.

    >>> sort_rules(Exactly(Window(3)), causal=True, window=2).causal
    False
    """

    mask: Mask

    def __post_init__(self) -> None:
        if not isinstance(self.mask, Mask):
            raise HeadloomError(
                f"Exactly takes a mask, not a {type(self.mask).__name__}: wrap booleans (B, T, S) as "
                "hl.Exactly(hl.Dense(visible))"
            )

    def to(self, *args: object, **kwargs: object) -> Mask:
        return Exactly(self.mask.to(*args, **kwargs))

    def visible(self, query_index: Tensor, key_index: Tensor) -> Tensor:
        return self.mask.visible(query_index, key_index)


@dataclasses.dataclass(frozen=True, eq=False)
class Rules:
    """A joined mask sorted by what its parts need: structure, token data, or pairs.

    exact: nothing is added to what was given (`Exactly`).
    """

    causal: bool = False
    window: int | None = None
    documents: Tensor | None = None
    padding: Tensor | None = None
    pairs: tuple[Mask, ...] = ()
    exact: bool = False


def sort_rules(mask: Mask | None, *, causal: bool, window: int | None) -> Rules:
    """Join `mask` with a module's own causality and window: only `Exactly` loosens them, by leaving them out."""
    parts = list(mask.parts()) if mask is not None else []
    exact = any(isinstance(part, Exactly) for part in parts)
    if exact:
        causal, window = False, None
    documents = padding = None
    pairs: list[Mask] = []
    for part in itertools.chain.from_iterable(map(_inside, parts)):
        if isinstance(part, Causal):
            causal = True
        elif isinstance(part, Window):
            window = part.width if window is None else min(window, part.width)
        elif isinstance(part, Documents):
            documents = given_once("documents", documents, part.values)
        elif isinstance(part, Padding):
            padding = part.values.bool() if padding is None else padding & part.values.bool()
        else:
            pairs.append(part)
    return Rules(causal, window, documents, padding, tuple(pairs), exact)


def _inside(part: Mask) -> Iterator[Mask]:
    if isinstance(part, Exactly):
        yield from itertools.chain.from_iterable(map(_inside, part.mask.parts()))
    else:
        yield part


def given_once(name: str, first: Tensor | None, second: Tensor | None) -> Tensor | None:
    """The one of two that was given. Raises HeadloomError for both."""
    if first is not None and second is not None:
        raise HeadloomError(f"{name} came twice (as an argument and inside mask=, or two in one mask); give them once")
    return second if first is None else first


@dataclasses.dataclass(frozen=True, eq=False)
class Visibility:
    """What T queries see of S keys, the queries being the last T of them.

    documents_BS: ints, -1 = padding, or None when all keys are real and of one document.
    pairs_BTS: further restrictions on pairs (bool, True = visible), or None.
    """

    T: int
    S: int
    causal: bool = True
    window: int | None = None
    documents_BS: Tensor | None = None
    pairs_BTS: Tensor | None = None

    @property
    def past(self) -> int:
        """Keys of tokens before this call's, S - T."""
        return self.S - self.T

    @classmethod
    def of(cls, rules: Rules, T: int, S: int, documents_BS: Tensor | None, device: torch.device) -> Visibility:
        """Lower sorted rules. Parts that are neither structure nor token data become (T, S) pairs here."""
        pairs = None
        for part in rules.pairs:
            if isinstance(part, Dense):
                visible = part.values.to(device)
                if visible.shape[-2:] != (T, S):
                    raise HeadloomError(
                        f"the mask is for {tuple(visible.shape[-2:])} (queries, keys), this call has {(T, S)}; "
                        "give a mask over the cache and this call's tokens"
                    )
            else:
                index = torch.arange(S, device=device)
                visible = part.visible(index[S - T :, None], index[None, :])[None]
            pairs = visible if pairs is None else pairs & visible
        return cls(T, S, rules.causal, rules.window, documents_BS, pairs)

    def looks_ahead(self, device: torch.device) -> Tensor | bool:
        """Whether a query sees a later key; where that is in a tensor's values, a boolean tensor."""
        if self.causal or self.S == 1:
            return False
        query = torch.arange(self.past, self.S, device=device)[:, None]
        later = torch.arange(self.S, device=device) > query
        return (self.dense(device=device) & later).any()

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """The keys start..end that causality and the window leave to the query rows first..last."""
        W = self.S if self.window is None else self.window
        end = self.past + last + (0 if self.causal else W - 1)
        return max(0, self.past + first - W + 1), min(self.S, end)

    def dense(self, first: int = 0, last: int | None = None, *, device: torch.device | None = None) -> Tensor:
        """Bool (B or 1, rows, S) for the query rows first..last: the definition, used within blocks and by maps."""
        last = self.T if last is None else last
        if self.documents_BS is not None:
            device = self.documents_BS.device
        query = torch.arange(self.past + first, self.past + last, device=device)[:, None]
        key = torch.arange(self.S, device=device)[None, :]
        out = torch.ones(1, last - first, self.S, dtype=torch.bool, device=device)
        if self.causal:
            out = out & Causal().visible(query, key)
        if self.window is not None:
            out = out & Window(self.window).visible(query, key)
        if self.documents_BS is not None:
            document = self.documents_BS[:, self.past + first : self.past + last, None]
            out = out & (document == self.documents_BS[:, None, :]) & (document >= 0)
        if self.pairs_BTS is not None:
            out = out & self.pairs_BTS[:, first:last]
        return out


def refuse(wrong: Tensor | bool, why: str) -> None:
    """Raise HeadloomError(why) if `wrong`. A compiled call cannot read a tensor: its graph raises RuntimeError(why)."""
    if isinstance(wrong, Tensor) and wrong.is_meta:
        return
    if isinstance(wrong, Tensor) and torch.compiler.is_compiling():
        torch._assert_async(~wrong, why)
    elif wrong:
        raise HeadloomError(why)


def expand_rows(visible_BTS: Tensor, past: int, rows_per_token: int, rows_causal: bool) -> Tensor:
    """Visibility of tokens (B, T, S), queries starting at key index `past` -> of the rows (B, T P, S P) that stand for
    them in the scores, P = `rows_per_token` each.

    All rows of a token share what the token sees, except that with `rows_causal` a row does not see the later rows of
    its own token. That order is the mechanism's own: a mask speaks of tokens, so it holds under `Exactly` too.
    """
    if rows_per_token == 1:
        return visible_BTS
    out = visible_BTS.repeat_interleave(rows_per_token, 1).repeat_interleave(rows_per_token, 2)
    if rows_causal:
        query = torch.arange(out.shape[1], device=out.device)[:, None] + past * rows_per_token
        key = torch.arange(out.shape[2], device=out.device)
        out = out & ((key <= query) | (key // rows_per_token != query // rows_per_token))
    return out
