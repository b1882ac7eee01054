"""Multi-matrix Factorization Attention. arXiv:2412.19255.

One wide key head and one wide value head, and many wide query heads made cheap by a factored projection. With x (T, D),
H heads and the latent width C:

    q_h = (x S_q) Q_h    S_q (D, C) shared, Q_h (C, C)       k = x S_k, v = x S_v    S_k, S_v (D, C), single heads
    o_h = softmax(q_h k^T / sqrt C) v                         out = concat_h(o_h) W_O    W_O (H C, D)

(paper; the scale 1/sqrt C is ours: the sources differ.) It is multi-query attention of head width C whose query
projection is factored: with S_q Q_h multiplied out it is `mqa` with head_dim = C. Weights by name: `q_down` S_q,
`q_heads` Q_1 .. Q_H stacked (H C, C), `k_proj` S_k, `v_proj` S_v, `o_proj` W_O. Ours: rotary on q_h and k, all C
features unless rotary_dim says fewer; qkv_bias on q_heads, k_proj and v_proj; qk_norm over each head's C, or over H C
and C; C = 2 head_dim unless given, since one key head stands for many.

Parameters 3 D C + H C^2 + H C D. FLOPs O(T^2), the scores of H heads of width C. Cache per token: k and v, 2 C.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self

from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.bases import BASES, PROJECTIONS, Base
from headloom.contract.common import FILLED, CommonOptions, Filled, need
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding, Linear, Plain
from headloom.contract.layer import Layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class MFAConfig(AttentionConfig):
    """As `AttentionConfig`. num_kv_heads is 1, value_dim is latent_dim."""

    base: str = "mfa"
    latent_dim: Annotated[
        Filled[int], "C: the width of every query head, of the key and of the value. None: 2 head_dim, its only meaning"
    ] = FILLED

    bases: ClassVar[tuple[str, ...]] = ("mfa",)
    without: ClassVar[tuple[str, ...]] = ("num_kv_heads", "value_dim", "rotary_dim")

    @property
    def exact(self) -> bool:
        return False

    def _folding(self) -> Folding:
        return Folding({"q_down and q_heads": f"W_Q, of {self.num_heads} heads of width {self.latent_dim}"})

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return cls(**{"hidden_size": 13, "num_heads": 3, "head_dim": 7, "latent_dim": 10, **changes})


class MFABase(Base[MFAConfig]):
    """q_h = (x S_q) Q_h; k and v single heads of width C, each from x. A cache remembers k and v."""

    options = MFAConfig
    turned = "k"

    def kv_heads(self, config: CommonOptions) -> int:
        return 1

    def check_heads(self, config: CommonOptions) -> None:
        G = config.num_kv_heads
        need(G == 1, f"base '{config.base}' has one key/value head, not {G}: leave num_kv_heads out")

    def complete(self, config: MFAConfig) -> None:
        config.fill("latent_dim", 2 * config.head_dim)
        C = config.latent_dim
        config.fill("value_dim", C)
        need(config.value_dim == C, f"value_dim is latent_dim {C} here, not {config.value_dim}: leave it out")

    def query_dim(self, config: MFAConfig) -> int:
        return config.latent_dim

    def turned_width(self, config: MFAConfig) -> tuple[str, int]:
        return "latent_dim", config.latent_dim

    def build(self, attn: Layer[MFAConfig]) -> None:
        self.build_keys(attn)
        c = attn.config
        attn.v_proj = PROJECTIONS[c.projection](c.hidden_size, c.latent_dim, bias=c.qkv_bias)

    @staticmethod
    def build_keys(attn: Layer[MFAConfig]) -> None:
        """The queries' and the key's projections and norms."""
        c = attn.config
        linear, C = PROJECTIONS[c.projection], c.latent_dim
        attn.q_down = linear(c.hidden_size, C, bias=False)
        attn.q_heads = linear(C, c.num_heads * C, bias=c.qkv_bias)
        attn.k_proj = linear(c.hidden_size, C, bias=c.qkv_bias)
        if c.qk_norm is not None:
            attn.q_norm = nn.RMSNorm(C if c.qk_norm == "head" else c.num_heads * C, eps=c.norm_eps)
            attn.k_norm = nn.RMSNorm(C, eps=c.norm_eps)

    def slots(self, config: MFAConfig) -> dict[str, tuple[int, int]]:
        return {"k": (1, config.latent_dim), "v": (1, config.latent_dim)}

    def project(self, attn: Layer[MFAConfig], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q_BHTC, k_BTC = self.project_keys(attn, x_BTD)
        return q_BHTC, {"k": k_BTC[:, None], "v": attn.v_proj(x_BTD)[:, None]}

    @staticmethod
    def project_keys(attn: Layer[MFAConfig], x_BTD: Tensor) -> tuple[Tensor, Tensor]:
        c = attn.config
        q, k_BTC = attn.q_heads(attn.q_down(x_BTD)), attn.k_proj(x_BTD)
        if c.qk_norm == "width":
            q = attn.q_norm(q)
        q_BTHC = q.unflatten(-1, (-1, c.latent_dim))
        if c.qk_norm == "head":
            q_BTHC = attn.q_norm(q_BTHC)
        return q_BTHC.transpose(1, 2), k_BTC if c.qk_norm is None else attn.k_norm(k_BTC)

    def expand(self, attn: Layer[MFAConfig], slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return slots["k"], slots["v"]


BASES.add("mfa", MFABase())


class MFA(Attention[MFAConfig]):
    """Multi-matrix Factorization Attention: multi-query attention of head width C with factored queries."""

    name = "mfa"
    title = "Multi-matrix Factorization Attention"
    paper = "arXiv:2412.19255"
    summary = "many wide query heads from two factors, one wide key and value head"
    config_cls = MFAConfig

    def fold_into(self, weights: Mapping[str, Linear]) -> Plain:
        return Plain(multiplied_queries(self), weights["k"], weights["v"], weights["o"], 1)


def multiplied_queries(attn: Any) -> Linear:
    """W_Q,h = Q_h S_q, float64."""
    return attn.q_heads.weight.double() @ attn.q_down.weight.double(), attn.q_heads.bias
