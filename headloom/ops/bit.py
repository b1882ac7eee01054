"""BitLinear (Ma et al. 2024, arXiv:2402.17764): ternary weights, 8-bit activations, in the training form.

W_q = s clip(round(W / s), -1, 1) with s = mean |W| (at least 1e-5) per matrix; x_q = round(127 x / m) m / 127 with
m = max |x| per token. Gradients pass straight through. No norm inside (ours: the authors put an RMSNorm before); the
bias is not quantised.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def ternary(weight: Tensor) -> Tensor:
    """The ternary matrix that stands for `weight`: values -s, 0, s."""
    scale = weight.abs().mean().clamp(min=1e-5)
    return scale * (weight / scale).round().clamp(-1, 1)


def eight_bit(x: Tensor) -> Tensor:
    """x rounded to 255 levels of its largest magnitude along the last axis."""
    largest = x.abs().amax(-1, keepdim=True)
    step = torch.where(largest > 0, largest, 1) / 127
    return (x / step).round() * step


class BitLinear(nn.Linear):
    """`nn.Linear` whose product is done by quantised weights and inputs; drop-in, same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + (ternary(self.weight) - self.weight).detach()
        x = x + (eight_bit(x) - x).detach()
        return F.linear(x, weight, self.bias)
