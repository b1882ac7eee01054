"""4-D masks that the caller gives: used as they are, nothing is added.

transformers hands such a mask to every layer as it is. But it also makes masks of that form itself: from a 2-D mask
inside a model under "sdpa" and "eager", and before the call for `generate` with a static cache. Ours add the layer's
own window and documents to those; to the caller's they add nothing. `Graft.forward` sees which of the two a call has,
and says it to the layers as `mask_is_all`. None: the bare model inside was called, and nothing says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError
from headloom.hf.model.masks import IMPLEMENTATION, visible_pairs

MADE = "made_mask"
"""Keyword of a call whose 4-D mask was made by `generate`."""


def is_4d(mask: Any) -> bool:
    """Whether a mask, or one of a dict of masks by kind of layer, has four axes: a value for each pair of tokens."""
    if isinstance(mask, dict):
        return any(is_4d(one) for one in mask.values())
    return isinstance(mask, Tensor) and mask.dim() == 4


def read_mask(mask: Any, B: int, T: int, implementation: str, dtype: torch.dtype) -> Any:
    """The caller's mask in the form that the layers of `implementation` take: booleans under "headloom", floats under
    "eager", whose layers would add booleans to the scores as 0 and 1.

    Raises: HeadloomError for a shape or values that the layers cannot read.
    """
    if isinstance(mask, dict):
        return {kind: read_mask(one, B, T, implementation, dtype) for kind, one in mask.items()}
    if mask is None:
        return None
    shape = tuple(mask.shape)
    if len(shape) != 4 or shape[1] != 1 or shape[0] not in (1, B) or shape[2] not in (1, T):
        raise HeadloomError(
            f"a mask of shape {shape} cannot be read here: give one with one head for all, (batch, 1, queries, keys), "
            f"with batch 1 or {B} and 1 or {T} queries"
        )
    visible = visible_pairs(mask)
    if implementation == IMPLEMENTATION:
        return visible
    if implementation == "eager" and mask.dtype == torch.bool:
        lowest = torch.finfo(torch.float32 if dtype == torch.float64 else dtype).min  # its softmax is in float32
        return torch.zeros(shape, dtype=dtype, device=mask.device).masked_fill_(~visible, lowest)
    return mask


def preparing(head: Any) -> Callable[..., Any]:
    """`prepare_inputs_for_generation` of a head, which marks the 4-D masks that it makes for a static cache."""
    own = head.prepare_inputs_for_generation

    @functools.wraps(own)
    def prepare_inputs_for_generation(self: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = own(self, *args, **kwargs)
        if is_4d(inputs.get("attention_mask")) and not is_4d(kwargs.get("attention_mask")):
            inputs[MADE] = True
        return inputs

    return prepare_inputs_for_generation
