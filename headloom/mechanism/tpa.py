"""Tensor Product Attention. arXiv:2501.06425.

Queries, keys and values are sums of few products of a vector over heads and a vector over features, both linear in x.

A_q (R_q, H), B_q (R_q, K), A_k (R_k, H), B_k (R_k, K), A_v (R_v, H), B_v (R_v, V), each a projection of x
q_h = (1/R_q) sum_r A_q[r, h] B_q[r];  k_h, v_h likewise;  positions turn B_q and B_k
o_h = softmax(q_h k_h^T / sqrt K) v_h;  out = concat_h(o_h) W_O

Names in the state dict: `q_a, q_b, k_a, k_b, v_a, v_b` (rows rank by rank), `o_proj`; with kv_only a plain `q_proj`.

Paper: R_q = 6, R_k = R_v = 2, the kv-only form, rotary on the B factors (it is linear, so turning q is the same).
Ours: ranks are at most min(H, K), beyond which nothing is gained; qk_norm is refused, since it would need every head's
keys. init "default" is PyTorch's; "paper": every A and B Xavier-uniform (as matrices, ours), W_O zero.

Parameters: D (R_q (H + K) + R_k (H + K) + R_v (H + V)) + H V D; kv_only D H K in place of R_q's.
FLOPs: scores as mha's. Cache per token: R_k (H + K) + R_v (H + V).

A call without a past expands its own keys and values, as large as its queries. Over a past few queries expand nothing:
score_h = (1/R_k) sum_r A_k[r, h] (q_h . B_k[r]) needs R_k key heads, o_h = (1/R_v) sum_r sum_s (w_hs A_v[s,r,h])
B_v[s,r] R_v value heads, in query blocks of bounded memory; for one query it is also the cheaper form. Many queries
expand blocks of 1024 keys and merge them by their log-sum-exp (`headloom.ops.factors`).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.bases import FactorOptions
from headloom.contract.config import AttentionConfig
from headloom.contract.handles import Handle
from headloom.ops import factors
from headloom.ops.cache import Seen
from headloom.ops.factors import Factors, mean_product
from headloom.ops.masks import Visibility


@dataclasses.dataclass(frozen=True, kw_only=True)
class TPAConfig(FactorOptions, AttentionConfig):
    """As `AttentionConfig` with the options of base tpa, and what follows."""

    base: str = "tpa"
    init: Annotated[Literal["default", "paper"], "PyTorch's own start, or the paper's, whose output is 0 at first"] = (
        "default"
    )

    bases: ClassVar[tuple[str, ...]] = ("tpa",)

    @classmethod
    def variations(cls) -> list[TPAConfig]:
        return [cls.tiny(kv_only=True, q_rank=None)]


@dataclasses.dataclass(frozen=True, eq=False)
class Factored(Handle):
    """The factors (A, B) of the keys, and those of the values."""

    k: Factors
    v: Factors


class TPA(Attention[TPAConfig]):
    """Tensor Product Attention: queries, keys and values as sums of few products."""

    name = "tpa"
    title = "Tensor Product Attention"
    paper = "arXiv:2501.06425"
    summary = "queries, keys and values are sums of few products of heads and features; factors are remembered"
    config_cls = TPAConfig

    o_proj: nn.Linear

    @torch.no_grad()
    def reset_heads(self) -> None:
        """init "paper" sets the base's projections too, so it is none for a graft, which keeps them."""
        if self.config.init == "default":
            return
        for name, module in self.named_children():
            if isinstance(module, nn.Linear) and name != "o_proj":
                nn.init.xavier_uniform_(module.weight)
        self.o_proj.weight.zero_()

    def read(self, seen: Seen, length: int | None) -> Factored:
        slots = self.turn_late(seen.slots, seen.positions_BS, length)
        return Factored((slots["k_a"], slots["k_b"]), (slots["v_a"], slots["v_b"]))

    def score(self, q: Tensor, handle: Handle, visibility: Visibility) -> Tensor:
        c = self.config
        assert isinstance(handle, Factored)
        if visibility.past == 0:
            return super().score(q, handle, visibility)
        dropout = c.dropout if self.training else 0.0
        k, v, scale = handle.k, handle.v, self._scale(q)
        return factors.attend(q, k, v, visibility, scale, kind=c.score, softcap=c.softcap, dropout=dropout)

    def expand(self, handle: Handle) -> tuple[Tensor, Tensor]:
        assert isinstance(handle, Factored)
        return mean_product(*handle.k), mean_product(*handle.v)
