"""Differential Transformer, first version. Ye et al. 2024, arXiv:2410.05258.

Two softmax patterns, the second subtracted: what both attend to cancels, as noise does in a differential amplifier.
H query heads and G key heads of width K stand in pairs (2i, 2i + 1); H / 2 value heads are twice as wide (paper):

    A_i = softmax(q_{2i} k_{2g}^T / sqrt K) - lambda softmax(q_{2i+1} k_{2g+1}^T / sqrt K),   g = i // (H / G)
    lambda = exp(lambda_q1 . lambda_k1) - exp(lambda_q2 . lambda_k2) + lambda_init           vectors of width K, one set
    lambda_init = 0.8 - 0.6 exp(-0.3 layer)                                                  layers counted from 0
    o_i = (1 - lambda_init) RMSNorm(A_i v_g),   v_g of width 2 V = the base's value heads 2g and 2g + 1 side by side
    out = concat_i(o_i) W_O                                                                   (H / 2) 2 V = H V wide

The vectors start as N(0, 0.1); the norm is over each pair's 2 V features, eps 1e-5, with a weight all pairs share
(code). With G < H the sources disagree: a pair of queries reads a pair of keys (code's fused form, ours), not one key
twice (code's plain form). Rotary on q and k. A query that sees nothing stays 0. lambda is computed in float32.

Two fused score calls and a subtraction: no scores are held. Extra parameters 4 K + 2 V; the core costs H (K + 2 V)
multiply-adds per visible pair; cache per token G (K + V), the base's: `k` as all first, then all second keys of the
pairs, `v` as G / 2 heads of 2 V. No init keeps the base's function, so a graft changes it. `maps`: the patterns of the
first heads of all pairs, then those of the second; effective (B, H/2, G/2, T, S) is A, before the norm; its rows sum to
1 - lambda.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.common import need
from headloom.contract.config import AttentionConfig
from headloom.ops.masks import Visibility
from headloom.ops.mixing import Mix

NORM_EPS = 1e-5


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiffConfig(AttentionConfig):
    """As `AttentionConfig`, with num_heads and num_kv_heads even; value_dim is half the width of a pair's values."""

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha")

    def __post_init__(self) -> None:
        super().__post_init__()
        H, G = self.num_heads, self.num_kv_heads
        need(H % 2 == 0, f"diff pairs its heads: num_heads must be even, not {H}")
        need(G % 2 == 0, f"diff pairs its key heads: num_kv_heads must be even, not {G}; diff2 takes any divisor")

    @property
    def exact(self) -> bool:
        return False


class Diff(Attention[DiffConfig]):
    """Differential attention: the difference of two softmax patterns over values twice as wide, normalised."""

    name = "diff"
    title = "Differential Transformer"
    paper = "arXiv:2410.05258"
    summary = "pairs of heads: one softmax pattern minus lambda times the other, then a norm"
    config_cls = DiffConfig

    lambda_q1: Mix
    lambda_k1: Mix
    lambda_q2: Mix
    lambda_k2: Mix

    def build_heads(self) -> None:
        c = self.config
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            setattr(self, name, Mix(c.head_dim))
        self.head_norm = nn.RMSNorm(2 * c.value_dim, eps=NORM_EPS)

    @torch.no_grad()
    def reset_heads(self) -> None:
        for vector in (self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2):
            vector.weight.normal_(0, 0.1)
        self.head_norm.reset_parameters()

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        c = self.config
        return {"k": (c.num_kv_heads, c.head_dim), "v": (c.num_kv_heads // 2, 2 * c.value_dim)}

    @property
    def lambda_init(self) -> float:
        return 0.8 - 0.6 * math.exp(-0.3 * self.layer_index)

    def strength(self) -> Tensor:
        """lambda, a number in float32 at least."""
        vectors = (self.lambda_q1.weight, self.lambda_k1.weight, self.lambda_q2.weight, self.lambda_k2.weight)
        wide = torch.promote_types(vectors[0].dtype, torch.float32)
        q1, k1, q2, k2 = (x.to(wide) for x in vectors)
        return torch.exp((q1 * k1).sum()) - torch.exp((q2 * k2).sum()) + self.lambda_init

    # Steps: within the scores all first heads of the pairs stand before all second ones ----------------------------

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        slots = super().write(slots, positions_BT)
        v_BTGV = slots["v"].transpose(1, 2)
        wide = v_BTGV.flatten(2).unflatten(2, (self.config.num_kv_heads // 2, -1))
        return {"k": _apart(slots["k"]), "v": wide.transpose(1, 2)}

    def queries(self, q_BHTK: Tensor, positions_BT: Tensor, length: int | None) -> Tensor:
        return _apart(super().queries(q_BHTK, positions_BT, length))

    def core(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        (q1, q2), (k1, k2) = q.chunk(2, 1), k.chunk(2, 1)
        first, second = super().core(q1, k1, v, visibility), super().core(q2, k2, v, visibility)
        return first - self.strength() * second

    def spread(self, weights: Tensor, v: Tensor) -> Tensor:
        first, second = (super(Diff, self).spread(half, v) for half in weights.chunk(2, 1))
        return first - self.strength() * second

    def merge(self, out_BHTV: Tensor, x_BTD: Tensor) -> Tensor:
        normed: Tensor = self.head_norm(out_BHTV)
        return normed * (1 - self.lambda_init)

    def effective_map(self, patterns: Tensor, x_BTD: Tensor) -> Tensor | None:
        c = self.config
        first, second = patterns.chunk(2, 1)
        serves = torch.arange(c.num_heads // 2, device=patterns.device)[:, None] // c.group
        serves = serves == torch.arange(c.num_kv_heads // 2, device=patterns.device)
        difference = first - self.strength() * second
        return torch.einsum("bhts,hg->bhgts", difference, serves.to(patterns.dtype))


def _apart(x_BHTK: Tensor) -> Tensor:
    """Heads 0, 2, 4, ... and then 1, 3, 5, ..."""
    return torch.cat((x_BHTK[:, ::2], x_BHTK[:, 1::2]), 1)
