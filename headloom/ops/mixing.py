"""Learned mixes over the head axis."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
from torch import Tensor, nn


class Mix(nn.Module):
    """One weight that mixes heads. A module and not a bare parameter: PEFT saves and swaps modules, so read
    `.weight` at each call. It is float32 at least, made in a half type or cast to one: rounding it would lose the
    zero sums that make an init exact.
    """

    def __init__(self, *shape: int):
        super().__init__()
        wide = torch.promote_types(torch.get_default_dtype(), torch.float32)
        self.weight = nn.Parameter(torch.empty(*shape, dtype=wide))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Mix:
        def keep_wide(x: Tensor) -> Tensor:
            out = fn(x)
            half = out.is_floating_point() and torch.finfo(out.dtype).bits < 32
            return x.to(out.device) if half else out

        super()._apply(keep_wide, recurse)  # type: ignore[no-untyped-call]
        return self

    def extra_repr(self) -> str:
        return "x".join(map(str, self.weight.shape))


def mix_scores(weight_OH: Tensor, x_BHTS: Tensor) -> Tensor:
    """sum_h weight[o, h] x[b, h, t, s] as one matrix product over all pairs, (B, O, T, S) contiguous."""
    with own_width(x_BHTS):
        mixed: Tensor = (weight_OH.to(x_BHTS.dtype) @ x_BHTS.flatten(2)).unflatten(2, x_BHTS.shape[2:])
    return mixed


def own_width(x: Tensor) -> contextlib.AbstractContextManager[object]:
    """Without autocast."""
    autocast = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if autocast else contextlib.nullcontext()


def mix_heads(weight_OH: Tensor, x_BHTK: Tensor) -> Tensor:
    """sum_h weight[o, h] x[b, h, t, k] as one matrix product per token, (B, O, T, K).

    The result is (B, T, O, K) in memory, so that the head axis can be split and joined to the token axis without a
    copy. Computed in float32 at least, under autocast too.
    """
    wide = torch.promote_types(x_BHTK.dtype, torch.float32)
    with own_width(x_BHTK):
        out = weight_OH.to(wide) @ x_BHTK.transpose(1, 2).to(wide)
    return out.to(x_BHTK.dtype).transpose(1, 2)
