"""Document ids of one call of a model: found once, before the layers, and handed down to all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError
from headloom.hf.model.cache import PACKED
from headloom.ops.tokens import restarts


def tokens_in(cache: Any) -> int | None:
    """The number of cached tokens, or None in a compiled call with a static cache, where it is a tensor."""
    tokens = cache.get_seq_length()
    return None if torch.compiler.is_compiling() and isinstance(tokens, Tensor) else int(tokens)


def find(kwargs: dict[str, Any], documents: Tensor | None, past: int | None) -> tuple[Tensor | None, bool]:
    """(document ids (B, T) or None, whether they tell documents apart); -1 = outside every document.

    In this order: `cu_seq_lens_q`, which also replaces a 2-D mask; `documents`; restarts of `position_ids` among real
    tokens. `kwargs` is the model's call, whose mask this may take away. A mask of pairs, given or made for a static
    cache, does not say which tokens are padding, so ids (0 and -1) go down where padding's positions look like
    restarts. `past`: cached tokens; None, a static cache in a compiled call, leaves restarts out: such a call continues
    one document.
    """
    tokens = kwargs.get("input_ids")
    tokens = kwargs.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        return None, False
    B, T = tokens.shape[:2]
    bounds = kwargs.get("cu_seq_lens_q")
    if bounds is not None:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor) and mask.dim() == 2:
            kwargs["attention_mask"] = None
        return from_bounds(bounds, B, T), True
    if documents is not None:
        if tuple(documents.shape) not in ((B, T), (T,)):
            raise HeadloomError(f"documents must have shape {(B, T)}, one id a token, not {tuple(documents.shape)}")
        return documents.expand(B, T), True
    positions = kwargs.get("position_ids")
    if positions is None or positions.dim() != 2 or past is None:
        return None, False
    if past:
        _check_continues(positions, one_of(kwargs.get("attention_mask")), past)
    if T == 1:
        return None, False
    mask = one_of(kwargs.get("attention_mask"))
    real = real_tokens(mask, T, past)
    positions = positions.expand(B, -1)
    found = restarts(positions, real)
    if found is None and real is not None:
        return (None if restarts(positions) is None else real.long() - 1), False
    # a compiled call cannot read values: ids are always found, and whether they differ stays unknown
    return found, found is not None and not torch.compiler.is_compiling()


def _check_continues(positions: Tensor, mask: Any, past: int) -> None:
    """Positions that start again after a filled cache would open a document that the cached tokens are not part of.
    Of each row the first real token of this call is asked: padding may have any position."""
    if torch.compiler.is_compiling() or (isinstance(mask, Tensor) and mask.dim() != 2):
        return
    first, cached = positions[:, :1], torch.tensor(past, device=positions.device)
    restart = first < cached
    real = real_tokens(mask, positions.shape[1], past)
    if real is not None:
        first = positions.expand(real.shape[0], -1).gather(1, real.long().argmax(1, keepdim=True))
        restart = (first < mask[:, :past].sum(1, keepdim=True)) & real.any(1, keepdim=True)
    if bool(restart.any()):
        raise HeadloomError(
            f"position_ids restart at {int(first[restart].min())} after {past} cached tokens: "
            "a new document needs a new cache"
        )


def from_bounds(bounds: Tensor, B: int, T: int) -> Tensor:
    """Document ids (B, T) from cumulative lengths over all B T tokens, e.g. [0, 3, 5]: 0 0 0 1 1, then -1.

    >>> from_bounds(torch.tensor([0, 3, 5]), 1, 6).tolist()
    [[0, 0, 0, 1, 1, -1]]
    """
    place = torch.arange(B * T, device=bounds.device)
    ids = torch.bucketize(place, bounds[1:], right=True)
    return ids.masked_fill(place >= bounds[-1], -1).view(B, T)


def one_of(mask: Any) -> Any:
    """A mask, or any of a static cache's masks for each kind of layer: in all of them a real token sees itself."""
    return next(iter(mask.values())) if isinstance(mask, dict) and mask else mask


def real_tokens(mask: Any, T: int, past: int) -> Tensor | None:
    """Which of this call's tokens are real (B, T): from a 2-D mask, or from a 4-D one by who may see itself."""
    if not isinstance(mask, Tensor) or mask.dim() not in (2, 4):
        return None
    if mask.dim() == 2:
        return mask[:, past : past + T].bool() if mask.shape[1] >= past + T else None
    visible = mask if mask.dtype == torch.bool else mask >= 0
    first = min(past, visible.shape[-1] - T)
    return visible[:, 0].diagonal(first, -2, -1)[:, :T]


def mark(cache: Any, out: Any) -> None:
    """Remember on the cache of this call, given or made inside, that it holds packed documents."""
    made = getattr(out, "cache", None)
    if made is None and isinstance(out, tuple):
        made = next((x for x in out if hasattr(x, "get_seq_length")), None)
    for one in (cache, made):
        if one is not None:
            setattr(one, PACKED, True)
