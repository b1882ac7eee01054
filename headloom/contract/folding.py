"""Parts of a mechanism that merge into the weights of plain attention.

A mix that is linear in the queries, keys, values or outputs of one token can be multiplied into the projection beside
it. It then adds no function that plain attention lacks: in training it is an optimiser effect and nothing more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor

Linear = tuple[Tensor, Tensor | None]
"""A projection: weight (out, in), bias (out) or None."""


@dataclasses.dataclass(frozen=True)
class Folding:
    """Which parts of a mechanism merge into plain weights. folds: part -> the weights it merges into; stays: part ->
    why it does not."""

    folds: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stays: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether all parts merge: plain attention then computes the same."""
        return not self.stays

    def __str__(self) -> str:
        lines = [f"{part} folds into {where}: only an optimiser effect" for part, where in self.folds.items()]
        for why in dict.fromkeys(self.stays.values()):
            parts = ", ".join(part for part, reason in self.stays.items() if reason == why)
            lines.append(f"not foldable: {parts}, because {why}")
        return "; ".join(lines) or "plain attention: there is nothing to fold"


@dataclasses.dataclass(frozen=True, eq=False)
class Plain:
    """The weights of plain grouped attention: q (H K, D), k (G K, D), v (G V, D), o (D, H V)."""

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    num_kv_heads: int


def mix_outputs(weight_OH: Tensor, linear: Linear) -> Linear:
    """The projection to sum_h weight[o, h] y_h, for one to the heads y_h; float64."""
    weight, bias = linear
    mix = weight_OH.to(torch.float64)

    def mixed(x: Tensor) -> Tensor:
        heads: Tensor = x.to(torch.float64).unflatten(0, (mix.shape[1], -1))
        out: Tensor = torch.tensordot(mix, heads, 1)
        return out.flatten(0, 1)

    return mixed(weight), None if bias is None else mixed(bias)


def mix_inputs(weight_OH: Tensor, linear: Linear) -> Linear:
    """The projection that does to y_h what the given one does to sum_h weight[o, h] y_h; float64."""
    weight, bias = linear
    transposed = mix_outputs(weight_OH.T, (weight.T, None))[0]
    return transposed.T, None if bias is None else bias.to(torch.float64)
