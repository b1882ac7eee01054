"""Bases gqa, mha and mqa: grouped queries (Ainslie et al. 2023, arXiv:2305.13245).

H query heads, G key/value heads: q_h = W_Q,h x, k_g = W_K,g x, v_g = W_V,g x; query head h reads kv head h // (H / G).
G = H is multi-head attention (Vaswani et al. 2017), G = 1 multi-query attention (Shazeer 2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from torch import Tensor, nn

from headloom.contract.bases.base import BASES, PROJECTIONS, Base, one_of_each
from headloom.contract.common import CommonOptions, need
from headloom.contract.layer import Layer


class GroupedBase(Base[CommonOptions]):
    """Every head has its query, every group of heads a key and a value. A cache stores k and v, (G, K) and (G, V)."""

    turned = "k"
    number: Literal["any", "each", "one"] = "any"
    """Of key/value heads: any divisor of H, one for each head, or one."""

    def __init__(self, number: Literal["any", "each", "one"], tiny: Mapping[str, Any] | None = None):
        self.number = number
        self.tiny = tiny or {}
        self.settles = () if number == "any" else ("num_kv_heads",)

    def kv_heads(self, config: CommonOptions) -> int:
        return 1 if self.number == "one" else config.num_heads

    def check_heads(self, config: CommonOptions) -> None:
        if self.number == "each":
            one_of_each(config)
        if self.number == "one":
            G = config.num_kv_heads
            need(G == 1, f"base '{config.base}' has one key/value head, not {G}: use base 'gqa'")

    def build(self, attn: Layer[CommonOptions]) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        attn.q_proj = linear(c.hidden_size, c.query_heads * c.head_dim, bias=c.qkv_bias)
        attn.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        attn.v_proj = linear(c.hidden_size, c.num_kv_heads * c.value_dim, bias=c.qkv_bias)
        if c.qk_norm is not None:
            heads = (1, 1) if c.qk_norm == "head" else (c.query_heads, c.num_kv_heads)
            attn.q_norm = nn.RMSNorm(heads[0] * c.head_dim, eps=c.norm_eps)
            attn.k_norm = nn.RMSNorm(heads[1] * c.head_dim, eps=c.norm_eps)

    def slots(self, config: CommonOptions) -> dict[str, tuple[int, int]]:
        return {"k": (config.num_kv_heads, config.head_dim), "v": (config.num_kv_heads, config.value_dim)}

    def project(self, attn: Layer[CommonOptions], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """In memory everything is (B, T, heads, width)."""
        c = attn.config
        q, k, v = self.split(attn, x_BTD)
        if c.qk_norm == "width":
            q, k = attn.q_norm(q.flatten(-2)).view_as(q), attn.k_norm(k.flatten(-2)).view_as(k)
        if c.qk_norm == "head":
            q, k = attn.q_norm(q), attn.k_norm(k)
        return q.transpose(1, 2), {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The projections that read x."""
        return "q_proj", "k_proj", "v_proj"

    def split(self, attn: Layer[CommonOptions], x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), before their norms."""
        c = attn.config
        q, k, v = (getattr(attn, name)(x_BTD) for name in self.inputs)
        widths = c.head_dim, c.head_dim, c.value_dim
        q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip((q, k, v), widths, strict=True))
        return q, k, v

    def expand(self, attn: Layer[CommonOptions], slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return slots["k"], slots["v"]


BASES.add("gqa", GroupedBase("any", tiny={"num_kv_heads": 2}))
BASES.add("mha", GroupedBase("each"))
BASES.add("mqa", GroupedBase("one"))
