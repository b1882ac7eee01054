"""Differential Transformer, second version (of arXiv:2410.05258).

Twice as many query heads, ordinary keys and values, a gate for each token and head in place of the first version's
lambda vectors, per-head norm and constants (its authors' second version):

    a_j = softmax(q_j k_g^T / sqrt K) v_g,   j = 0 .. 2 H - 1,   g = j // (2 H / G)          (B, 2 H, T, V)
    o_h = a_{2h} - sigmoid(lambda_h(x)) a_{2h+1},   lambda = lambda_proj(x), Linear D -> H without a bias
    out = concat_h(o_h) W_O

x is the query's own token. Both heads of a pair read one key and value head (ours: G divides H, not only 2 H), so the
cache is the base's, G (K + V) per token. Rotary on q and k. lambda_proj starts as PyTorch's Linear and stays a plain
one under projection "bit" (ours). No init keeps the base's function, so a graft changes it.

Extra parameters D H K (the second queries) + D H (the gates); the core costs 2 H (K + V) multiply-adds per visible
pair, twice the base's. `maps`: 2 H patterns; effective (B, H, G, T, S) is their gated difference, whose rows sum to
1 - sigmoid(lambda_h(x)).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.config import AttentionConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diff2Config(AttentionConfig):
    """As `AttentionConfig`; num_heads counts the heads after subtraction, each of two queries."""

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa")

    @property
    def query_heads(self) -> int:
        return 2 * self.num_heads

    @property
    def exact(self) -> bool:
        return False


class Diff2(Attention[Diff2Config]):
    """Differential attention, second version: the difference of two heads, gated by the query's token."""

    name = "diff2"
    title = "Differential Transformer, version 2"
    paper = "arXiv:2410.05258"
    summary = "two queries a head: one head's output minus a token's own share of the other's"
    config_cls = Diff2Config

    def build_heads(self) -> None:
        self.lambda_proj = nn.Linear(self.config.hidden_size, self.config.num_heads, bias=False)

    @torch.no_grad()
    def reset_heads(self) -> None:
        self.lambda_proj.reset_parameters()

    def merge(self, out_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        return self._subtract(out_BHTV, x_BTD)

    def effective_map(self, patterns: Tensor, x_BTD: Tensor) -> Tensor | None:
        return super().effective_map(self._subtract(patterns, x_BTD), x_BTD)

    def _subtract(self, heads_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        """(B, 2 H, T, ...) -> (B, H, T, ...)"""
        gate_BHT = torch.sigmoid(self.lambda_proj(x_BTD)).transpose(1, 2)
        return heads_BHTV[:, ::2] - gate_BHT.unsqueeze(-1) * heads_BHTV[:, 1::2]
