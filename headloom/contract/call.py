"""One call of an attention: what it was given, checked and sorted, and what is ready to be scored."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from headloom.contract.arguments import as_mask, check_cache, check_rows, check_token_data
from headloom.contract.handles import Handle
from headloom.core.errors import HeadloomError
from headloom.ops.cache import Cache, Seen
from headloom.ops.masks import Mask, Rules, Visibility, given_once, sort_rules
from headloom.ops.tokens import cover, place


@dataclasses.dataclass(frozen=True, eq=False)
class Given:
    """What a call says of its tokens.

    positions_BT: ints (1 or B, T). documents_BT: ints (B, T), -1 = padding, or None when all tokens are real and of one
    document. padding: as given, (B, T) or (B, S). stated: whether padding or documents were given. past: tokens in the
    cache before this call.
    """

    name: str
    rules: Rules
    positions_BT: Tensor
    documents_BT: Tensor | None
    padding: Tensor | None
    stated: bool
    past: int
    batch: int
    device: torch.device

    @property
    def T(self) -> int:
        """Tokens of this call."""
        return self.positions_BT.shape[-1]

    def visibility(self, seen: Seen) -> Visibility:
        """What this call's tokens see of `seen`.

        Raises: HeadloomError: a window or a mask over pairs, where a state of constant size stands for the tokens.
        """
        rules, T = self.rules, self.T
        if seen.tokens is None:
            S = self.past + T
            # an exact mask is all there is: what the cache remembers of padding and documents hides nothing
            told = None if rules.exact and not self.stated else cover(seen.documents_BS, self.padding, self.batch, S)
            return Visibility.of(rules, T, S, told, self.device)
        if rules.window is not None or rules.pairs or rules.exact:
            raise HeadloomError(
                f"{self.name} remembers a state of constant size: a window or a mask over pairs cannot reach the "
                "tokens in it. Give the whole sequence without a cache"
            )
        return Visibility.of(rules, T, seen.positions_BS.shape[-1], seen.documents_BS, self.device)


def sort_call(
    name: str,
    layer: int,
    x_BTD: Tensor,
    *,
    causal: bool,
    window: int | None,
    mask: Mask | Tensor | None = None,
    positions: Tensor | None = None,
    padding: Tensor | None = None,
    documents: Tensor | None = None,
    cache: Cache | None = None,
) -> Given:
    """Check the arguments of a call (as `Attention.forward`) of the mechanism `name` in a layer, and sort them.

    Raises: HeadloomError: a wrong type, shape or device, or the same thing said twice.
    """
    B, T, _ = x_BTD.shape
    check_cache(cache, layer, B)
    mask = as_mask(mask)
    check_rows(mask, B)
    rules = sort_rules(mask, causal=causal, window=window)
    padding = given_once("padding", padding, rules.padding)
    documents = given_once("documents", documents, rules.documents)
    check_token_data(x_BTD, positions=positions, padding=padding, documents=documents)
    past = 0 if cache is None else cache.length(layer)
    held = None if cache is None else cache.held(layer)
    stated = padding is not None or documents is not None
    positions, placed = place(
        B, T, x_BTD.device, past=past, held=held, positions=positions, padding=padding, documents=documents,
        exact=rules.exact,
    )  # fmt: skip
    return Given(name, rules, positions, placed, padding, stated, past, B, x_BTD.device)


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """A call that is ready to be scored: queries (B, heads, T, K), what they meet, and what they see of it."""

    q: Tensor
    handle: Handle
    visibility: Visibility
