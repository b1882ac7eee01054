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
from headloom.ops import blocks
from headloom.ops.masks import Dense, Exactly, Mask, Padding, Visibility, refuse, sort_rules
from headloom.ops.scores import attend
from headloom.ops.tokens import cover, place

IMPLEMENTATION = "headloom"
WRITTEN_OUT = "headloom_written_out"

# transformers' mask functions that our layers know already: causality, windows and documents are joined by themselves
_KNOWN = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay.",
    "sliding_window_bidirectional_overlay.",
    "packed_sequence_mask_function.",
)


@functools.cache
def register_masks() -> None:
    """Register the functions with transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(IMPLEMENTATION, attention_function)
    AttentionMaskInterface.register(IMPLEMENTATION, mask_function)
    AttentionMaskInterface.register(WRITTEN_OUT, written_out)


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

    A rule that is neither causality, window, packing nor padding is written out as `Dense`; so is that of a static
    cache, which hands out places that nothing stands at yet.
    """
    static = isinstance(q_offset, Tensor) or kv_length + kv_offset > q_offset + q_length
    if mask_function is not None and (static or not _is_known(mask_function, kwargs)):
        given = {k: v for k, v in kwargs.items() if k in ("use_vmap", "device")}
        dense = written_out(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, **given
        )
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


def written_out(*args: Any, **kwargs: Any) -> Tensor:
    """transformers' own booleans (B, 1, T, keys), also where it would leave a plain causal mask to its attention: None
    says nothing of a static cache's unwritten places."""
    from transformers.masking_utils import sdpa_mask

    dense = sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})
    assert dense is not None
    return dense


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


def dense_mask(config: Any, inputs_embeds: Tensor, **kwargs: Any) -> Any:
    """The mask of a static cache by transformers' own function: booleans (B, 1, T, places of the cache), or a dict with
    one for each kind of layer where the family has several kinds. Where it has one, windows are left out of the mask,
    and the layers that have one add it."""
    from transformers.masking_utils import create_masks_for_generate

    plain = copy.copy(config)
    plain._attn_implementation_internal = WRITTEN_OUT
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds and not _knows_kinds(config):
        del plain.layer_types
        plain.sliding_window = config.sliding_window if len(kinds) == 1 else None
    return create_masks_for_generate(plain, inputs_embeds, **kwargs)


def _knows_kinds(config: Any) -> bool:
    """Whether the family's own config says of each layer which kind it is."""
    return any("layer_types" in getattr(cls, "__annotations__", {}) for cls in type(config).__mro__)


def arriving(
    mask: Any, past: int, T: int, *, cut: Callable[[Tensor], Tensor] | None = None, exact: bool = False
) -> Mask | None:
    """Whatever transformers hands over -> a mask over the `past` cached tokens that this layer sees and this call.

    None, a mask of ours, 4-D booleans (True = visible) or floats (added to scores: -inf or a type's lowest = hidden),
    and 2-D padding, as the backends "headloom", "sdpa", "eager" and "flash_attention_2" make them. `cut` takes from a
    mask's last axis what is about the tokens this layer looks at: by default the last ones of all tokens. `exact`: a
    4-D mask is the caller's, and all there is; one row of it stands for all queries.
    """
    if mask is None:
        return None
    S = past + T
    cut = cut or (lambda x: x if x.shape[-1] == S else x[..., -S:])
    if isinstance(mask, Mask):
        parts = [type(part)(cut(part.values)) if isinstance(part, Padding | Dense) else part for part in mask.parts()]
        return functools.reduce(lambda a, b: a & b, parts)
    if isinstance(mask, Tensor) and mask.dim() == 2:
        return Padding(cut(mask.bool()))
    if isinstance(mask, Tensor) and mask.dim() == 4 and mask.shape[1] == 1:
        visible = visible_pairs(mask)[:, 0]
        return Exactly(Dense(cut(visible.expand(-1, T, -1)))) if exact else Dense(cut(visible))
    shape = f" of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else ""
    raise HeadloomError(
        f"cannot read an attention mask of type {type(mask).__name__}{shape}. Give a 2-D padding mask or a 4-D mask "
        f"with one head, or use attn_implementation='{IMPLEMENTATION}'"
    )


def alone(mask: Any, T: int, exact: bool = False) -> Mask | None:
    """`arriving` for a call without a cache, whose mask must be about its T tokens. Raises HeadloomError otherwise."""

    def check(values: Tensor) -> Tensor:
        if values.shape[-1] != T:
            raise HeadloomError(
                f"the attention mask covers {values.shape[-1]} tokens, this call has {T} and no cache: give one of {T}"
            )
        return values

    return arriving(mask, 0, T, cut=check, exact=exact)


def is_all(mask: Any, mask_is_all: bool | None) -> bool:
    """Whether what arrives at a layer is the caller's 4-D mask. When the bare model is called, nothing says so (None):
    what transformers then makes of a 2-D mask under "sdpa" and "eager" holds causality, window and padding as well."""
    return isinstance(mask, Tensor) and mask.dim() == 4 and mask_is_all is not False


def visible_pairs(mask: Tensor) -> Tensor:
    """A 4-D mask as booleans. Float masks are added to scores; only those that hide or show entirely can be read."""
    if mask.dtype == torch.bool:
        return mask
    if not mask.is_floating_point():
        raise HeadloomError(f"a 4-D mask must be boolean (True = visible) or additive floats, not {mask.dtype}")
    visible = mask == 0
    refuse(
        (~visible & ~(mask <= -1e4)).any(),
        "a 4-D float mask must hold 0 (visible) and -inf (hidden); other biases are not supported",
    )
    return visible


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
    with_weights: bool = False,
    mask_is_all: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
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
    exact = is_all(attention_mask, mask_is_all)
    mask = arriving(attention_mask, past, T, cut=(lambda x: x) if exact else None, exact=exact)
    rules = sort_rules(mask, causal=causal, window=sliding_window)
    real = rules.padding
    position_ids = None if in_order or exact else position_ids
    _, found = place(
        B, T, query.device, past=past, held=None, positions=position_ids, padding=real, documents=documents
    )
    if past:  # packed documents are refused with a cache; what is left is padding, which covers the cached tokens too
        found = None
    visibility = Visibility.of(rules, T, past + T, cover(found, real, B, past + T), query.device)
    scale = scaling if scaling is not None else width**-0.5
    if with_weights:
        visible = visibility.dense(device=query.device)
        weights = blocks.weigh(query, key, visible, scale, kind="softmax", softcap=softcap).to(query.dtype)
        return blocks.spread(weights, value, dropout).transpose(1, 2).contiguous(), weights
    out = attend(query, key, value, visibility, scale=scale, softcap=softcap, dropout=dropout)
    return out.transpose(1, 2).contiguous(), None
