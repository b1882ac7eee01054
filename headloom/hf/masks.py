"""What transformers hands to an attention, and the attention of layers that were not grafted.

Two functions are registered under the name "headloom": a mask function, which says in predicates what transformers
would write into a matrix, and an attention function. Registered together, because an attention without a mask function
silently loses causality; and both our layers and the function join their OWN causality and window with whatever
arrives, so that no mask at all never means "see everything".
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError
from headloom.ops.masks import Dense, Mask, Padding, Visibility, sort_rules
from headloom.ops.scores import attend
from headloom.ops.tokens import cover, place

IMPLEMENTATION = "headloom"

# transformers' mask functions that our layers know already: causality, windows and documents are joined by themselves
_KNOWN = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.",
    "sliding_window_bidirectional_overlay.",
    "packed_sequence_mask_function.",
)


@functools.cache
def register() -> None:
    """Register both functions with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_function)


def mask_function(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Mask | None:
    """The call's mask as a predicate: `Padding` over the cache and this call, or None (only causality and windows).

    A rule that is neither causality, window, packing nor padding is written out as `Dense`.
    """
    if mask_function is not None and not _is_known(mask_function, kwargs):
        from transformers.masking_utils import sdpa_mask

        given = {k: v for k, v in kwargs.items() if k in ("use_vmap", "device")}
        dense = sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask,
            allow_is_causal_skip=False, **given,
        )  # fmt: skip
        assert dense is not None
        return Dense(dense[:, 0])
    if attention_mask is None:
        return None
    seen = int(q_offset) + q_length
    if attention_mask.shape[-1] < seen:
        raise HeadloomError(
            f"attention_mask covers {attention_mask.shape[-1]} tokens, the cache and this call have {seen}: "
            "give one over both"
        )
    real = attention_mask[:, :seen].bool()
    return None if not torch.compiler.is_compiling() and bool(real.all()) else Padding(real)


def _members(function: Any) -> Iterator[Any]:
    """The functions that `and_masks` and the packing remap joined into one."""
    name = getattr(function, "__qualname__", "")
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    if name.startswith("and_masks."):
        for member in (f for cell in cells if isinstance(cell, tuple) for f in cell):
            yield from _members(member)
    elif name.startswith("remap_positions_for_packed_sequence."):
        for member in (f for f in cells if callable(f)):
            yield from _members(member)
    else:
        yield function


def _is_known(function: Any, kwargs: dict[str, Any]) -> bool:
    if torch.compiler.is_compiling():  # a compiler cannot look into functions; `use_vmap` marks what a model has added
        return not kwargs.get("use_vmap", False)
    return all(getattr(f, "__qualname__", "").startswith(_KNOWN) for f in _members(function))


def dense_mask(config: Any, inputs_embeds: Tensor, **kwargs: Any) -> Tensor | None:
    """The mask of a static cache, (B, 1, T, room) booleans, by transformers' own function."""
    from transformers.masking_utils import create_masks_for_generate

    if len(set(getattr(config, "layer_types", None) or ())) > 1:
        raise HeadloomError(
            "a static cache serves layers of one kind; this model has windows in some layers only. Leave "
            "cache_implementation at its default (dynamic)"
        )
    plain = copy.copy(config)
    plain._attn_implementation_internal = "sdpa"
    return create_masks_for_generate(plain, inputs_embeds, **kwargs)


def arriving(mask: Any, past: int, T: int, *, static: bool = False) -> Mask | None:
    """Whatever transformers hands over -> a mask over the `past` cached tokens that this layer sees and this call.

    None, a mask of ours, 4-D booleans (True = visible) or floats (added to scores: -inf or a type's lowest = hidden),
    and 2-D padding, as the backends "headloom", "sdpa", "eager" and "flash_attention_2" make them. `static`: the cache
    has room behind this call, and a dense mask covers it.
    """
    if mask is None:
        return None
    if isinstance(mask, Mask):
        parts = [_cut(part, past + T, static) for part in mask.parts()]
        return functools.reduce(lambda a, b: a & b, parts)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return _cut(Padding(mask.bool()), past + T, static)
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == 1:
        return _cut(Dense(visible_pairs(mask)[:, 0]), past + T, static)
    shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else ""
    raise HeadloomError(
        f"cannot read an attention mask of type {type(mask).__name__}{shape}. Give a 2-D padding mask or a 4-D mask "
        f"with one head, or use attn_implementation='{IMPLEMENTATION}'"
    )


def visible_pairs(mask: Tensor) -> Tensor:
    """A 4-D mask as booleans. Float masks are added to scores; only those that hide or show entirely can be read."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise HeadloomError(f"a 4-D mask must be boolean (True = visible) or additive floats, not {mask.dtype}")
    visible = mask == 0
    if not torch.compiler.is_compiling() and bool((~visible & (mask > -1e4)).any()):
        raise HeadloomError("a 4-D float mask must hold 0 (visible) and -inf (hidden); other biases are not supported")
    return visible


def _cut(part: Mask, S: int, static: bool) -> Mask:
    """The part of a mask that is about the S tokens this layer looks at: the last ones of all tokens, except that a
    static cache's dense mask goes on behind this call."""
    if isinstance(part, Padding):
        return part if part.values.shape[1] == S else Padding(part.values[:, -S:])
    if isinstance(part, Dense) and part.values.shape[-1] != S:
        return Dense(part.values[..., :S] if static else part.values[..., -S:])
    return part


def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    position_ids: Tensor | None = None,
    documents: Tensor | None = None,
    in_order: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer that was not grafted: (B, H, T, K), (B, G, S, K), (B, G, S, V) -> (B, T, H, V).

    Complete in itself: scale, soft-cap, window, grouped heads, dropout, documents, and causality unless the module is
    an encoder's.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("position_bias") is not None:
        raise HeadloomError("attention sinks and position biases of layers that are not grafted are not supported")
    B, _, T, width = query.shape
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if isinstance(attention_mask, Tensor) and attention_mask.dim() == 4:
        sliding_window = None  # a 4-D mask of transformers holds the window already, and may count unwritten room
    past = key.shape[2] - T
    rules = sort_rules(arriving(attention_mask, past, T), causal=causal, window=sliding_window)
    real = rules.padding
    position_ids = None if in_order else position_ids
    _, found = place(
        B, T, query.device, past=past, held=None, positions=position_ids, padding=real, documents=documents
    )
    if past:  # packed documents are refused with a cache; what is left is padding, which covers the cached tokens too
        found = None
    visibility = Visibility.of(rules, T, past + T, cover(found, real, B, past + T), query.device)
    scale = scaling if scaling is not None else width**-0.5
    out = attend(query, key, value, visibility, scale=scale, softcap=softcap, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None
