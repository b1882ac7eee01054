"""What a call of an attention may be given: a wrong type, shape or device is one sentence before any arithmetic."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from headloom.core.errors import HeadloomError
from headloom.ops.cache import Cache
from headloom.ops.masks import Dense, Exactly, Mask


def check_input(x: Any, hidden_size: int, projection: Any) -> None:
    """Refuse an input that is not (B, T, D) numbers of the weights' type and device."""
    if not isinstance(x, Tensor):
        raise HeadloomError(f"the input must be a tensor of shape (B, T, {hidden_size}), not {_named(x)}")
    if x.dim() != 3 or x.shape[-1] != hidden_size:
        raise HeadloomError(f"the input must have shape (B, T, {hidden_size}), not {tuple(x.shape)}")
    if not x.is_floating_point():
        raise HeadloomError(f"the input must hold floating-point numbers (embeddings, not token ids), not {_kind(x)}")
    if type(projection) is not nn.Linear:  # quantized or adapted weights have a type of their own
        return
    weight = projection.weight
    if x.device.type != weight.device.type:
        raise HeadloomError(f"the input is on {x.device} and the weights are on {weight.device}: move one of them")
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise HeadloomError(
            f"the input is {_kind(x)} and the weights are {_kind(weight)}: give x.to({weight.dtype}), or cast the "
            f"attention by .to({x.dtype})"
        )


def check_token_data(x: Tensor, **given: Any) -> None:
    """Refuse positions, padding and documents that are no tensors of whole numbers (padding: or booleans) beside x."""
    for name, value in given.items():
        if value is None:
            continue
        booleans = " or booleans" if name == "padding" else ""
        if not isinstance(value, Tensor):
            raise HeadloomError(f"{name} must be a tensor of whole numbers{booleans}, not {_named(value)}")
        if value.is_floating_point() or value.is_complex() or (value.dtype == torch.bool and not booleans):
            raise HeadloomError(f"{name} must be whole numbers{booleans}, not {_kind(value)}")
        if value.device.type != x.device.type and not (value.is_meta or x.is_meta):
            raise HeadloomError(
                f"{name} is on {value.device} and the input on {x.device}: give {name}.to('{x.device}')"
            )


def as_mask(mask: Any) -> Mask | None:
    """The mask of a call: a boolean tensor (T, S), (B, T, S) or (B, 1, T, S), True = visible, is `Dense`."""
    if mask is None or isinstance(mask, Mask):
        return mask
    allowed = (
        "a mask of hl.Causal(), hl.Window(W), hl.Documents, hl.Padding, hl.Dense joined by &, or a boolean tensor "
        "(T, S) or (B, T, S), True = visible"
    )
    if not isinstance(mask, Tensor):
        raise HeadloomError(f"mask must be {allowed}, not {_named(mask)}")
    if mask.dtype != torch.bool:
        raise HeadloomError(
            f"mask must be {allowed}, not a {_kind(mask)} tensor: give mask.bool() where 1 is visible, or mask == 0 "
            "where it is what is added to the scores"
        )
    return Dense(mask[None] if mask.dim() == 2 else mask)


def check_rows(mask: Mask | None, batch: int) -> None:
    """Refuse a given mask over other sequences than the call's."""
    for part in () if mask is None else mask.parts():
        inner = part.mask if isinstance(part, Exactly) else part
        for each in inner.parts():
            if isinstance(each, Dense) and each.values.shape[0] not in (1, batch):
                raise HeadloomError(
                    f"the mask is for {each.values.shape[0]} sequences and the input has {batch}: give (B, T, S) with "
                    f"B = {batch} or 1"
                )


def check_cache(cache: Any, layer: int, batch: int) -> None:
    """Refuse what is no cache, and one that holds other sequences than the call's."""
    if cache is None:
        return
    if not isinstance(cache, Cache):
        raise HeadloomError(f"cache must be a hl.Cache(), not {_named(cache)}; a model takes transformers' caches")
    held = cache.held(layer) if type(cache) is Cache else None
    rows = batch if held is None else next((slot.shape[0] for slot in held.slots.values()), batch)
    if rows != batch:
        raise HeadloomError(
            f"the cache holds {rows} sequences and the input {batch}: give the same number, or a new hl.Cache()"
        )


def _named(value: Any) -> str:
    return f"{value!r}" if isinstance(value, str | int | float | bool) else f"a {type(value).__name__}"


def _kind(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")
