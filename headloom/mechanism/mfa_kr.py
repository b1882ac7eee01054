"""Multi-matrix Factorization Attention with Key-Reuse. arXiv:2412.19255.

As `mfa`, but the value is made from the key, so that a cache remembers the key alone (C = latent_dim):

    q_h = (x S_q) Q_h,  k = x S_k,  v = k + alpha * (k N)      N (C, C), alpha (C) a gate per feature, zero at the start

with k before rotation (paper). Weights by name: `q_down` S_q, `q_heads` Q_1 .. Q_H stacked, `k_proj` S_k, `v_proj` N,
`alpha.weight` alpha, `o_proj` W_O. Ours: the scale 1/sqrt C; the key that makes v is the one after qk_norm; N has no
bias. The cache holds k unrotated, C numbers, and rotates it on reading. v is linear in k, so the weights are applied to
k and N to the H results, o_h = a_h + alpha * (a_h N) with a_h = sum_j weight_hj k_j: decoding never runs N over the
past. With BitLinear projections N is not linear, and there v is made from every key read.

Parameters 2 D C + H C^2 + C^2 + C + H C D. FLOPs O(T^2), as mfa and 2 H C^2 a token. Cache per token: k, C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.bases import BASES, PROJECTIONS
from headloom.contract.folding import Folding, Linear, Plain
from headloom.contract.handles import Handle, Whole
from headloom.contract.layer import Layer
from headloom.mechanism.mfa import MFABase, MFAConfig, multiplied_queries
from headloom.ops.cache import Seen
from headloom.ops.mixing import Mix


@dataclasses.dataclass(frozen=True, kw_only=True)
class MFAKRConfig(MFAConfig):
    """As `MFAConfig`: latent_dim is C, the width of every query head, of the key and of the value made from it."""

    base: str = "mfa_kr"

    bases: ClassVar[tuple[str, ...]] = ("mfa_kr",)

    def _folding(self) -> Folding:
        if self.qk_norm is not None:
            return Folding(stays={"v_proj and alpha": "the value is made from the key after its norm"})
        return Folding({**super()._folding().folds, "v_proj and alpha": "W_V"})


class KeyReuseBase(MFABase):
    """As `MFABase`, but v comes from k through a square matrix. A cache remembers k, unrotated."""

    def build(self, attn: Layer[MFAConfig]) -> None:
        self.build_keys(attn)
        c = attn.config
        attn.v_proj = PROJECTIONS[c.projection](c.latent_dim, c.latent_dim, bias=False)

    def slots(self, config: MFAConfig) -> dict[str, tuple[int, int]]:
        return {"k": (1, config.latent_dim)}

    def project(self, attn: Layer[MFAConfig], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTC, k_BTC = self.project_keys(attn, x_BTD)
        return q_BHTC, {"k": k_BTC[:, None]}

    def expand(self, attn: Any, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """k and v from the unrotated k."""
        k = slots["k"]
        return k, attn.value(k)


BASES.add("mfa_kr", KeyReuseBase())


class MFAKR(Attention[MFAKRConfig]):
    """Multi-matrix Factorization Attention whose value reuses the key."""

    name = "mfa_kr"
    title = "Multi-matrix Factorization Attention, Key-Reuse"
    paper = "arXiv:2412.19255"
    summary = "mfa whose value is made from the key: half the cache"
    config_cls = MFAKRConfig

    alpha: Mix
    v_proj: nn.Linear

    def build_heads(self) -> None:
        self.alpha = Mix(self.config.latent_dim)

    @torch.no_grad()
    def reset_heads(self) -> None:
        self.alpha.weight.zero_()

    def value(self, k: Tensor) -> Tensor:
        """v = k + alpha * (k N), along the last axis."""
        reused: Tensor = self.alpha.weight.to(k.dtype) * self.v_proj(k)
        return k + reused

    @property
    def _linear(self) -> bool:
        return self.config.projection == "linear"

    # Steps -------------------------------------------------------------------------------------------------------

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        return slots  # unrotated: the value is made from the key before rotation

    @property
    def turns_late(self) -> bool:
        return self.rotary is not None

    def read(self, seen: Seen, length: int | None) -> Handle:
        k = seen.slots["k"]
        return Whole(self.turn(k, seen.positions_BS, length), k if self._linear else self.value(k))

    def fold_into(self, weights: Mapping[str, Linear]) -> Plain:
        """W_V = (1 + alpha N) W_K."""
        weight, bias = weights["k"]
        N = self.v_proj.weight.double()
        reuse = torch.eye(len(N), dtype=N.dtype, device=N.device) + self.alpha.weight.double()[:, None] * N
        v = reuse @ weight.double(), None if bias is None else reuse @ bias.double()
        return Plain(multiplied_queries(self), weights["k"], v, weights["o"], 1)

    def merge(self, out_BHTC: Tensor, x_BTD: Tensor) -> Tensor:
        return self.value(out_BHTC) if self._linear else out_BHTC
