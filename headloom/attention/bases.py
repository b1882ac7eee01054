"""Bases: how q, k, v come from x, and what of a token a cache remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from headloom.core.registry import Registry
from headloom.ops.bit import BitLinear

if TYPE_CHECKING:
    from headloom.attention.contract import Attention

PROJECTIONS = {"linear": nn.Linear, "bit": BitLinear}


class Base(Protocol):
    """What a heads part stands on. A base adds its projections to the module and says what of a token is remembered."""

    #: the slot that a position rotates, in its first `rotary_dim` features
    turned: str

    def build(self, attn: Attention) -> None:
        """Create the projections on `attn`."""

    def slots(self, config: Any) -> dict[str, tuple[int, int]]:
        """Slots of one token: name -> (heads, width)."""

    def project(self, attn: Attention, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """q (B, H, T, K) and the slots (B, heads, T, width), normalised, not yet rotated."""

    def expand(self, attn: Attention, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """k (B, G, S, K) and v (B, G, S, V) from the slots; linear in the rotated slot, so rotation passes through."""


class GroupedBase:
    """Grouped queries (Ainslie et al. 2023, arXiv:2305.13245): H query heads, G key/value heads.

    q_h = W_Q,h x, k_g = W_K,g x, v_g = W_V,g x; query head h reads kv head h // (H / G). G = H is multi-head
    attention (Vaswani et al. 2017), G = 1 multi-query attention (Shazeer 2019).
    """

    turned = "k"

    def build(self, attn: Attention) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        attn.q_proj = linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        attn.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        attn.v_proj = linear(c.hidden_size, c.num_kv_heads * c.value_dim, bias=c.qkv_bias)
        if c.qk_norm is not None:
            heads = (1, 1) if c.qk_norm == "head" else (c.num_heads, c.num_kv_heads)
            attn.q_norm = nn.RMSNorm(heads[0] * c.head_dim, eps=c.norm_eps)
            attn.k_norm = nn.RMSNorm(heads[1] * c.head_dim, eps=c.norm_eps)

    def slots(self, config: Any) -> dict[str, tuple[int, int]]:
        return {"k": (config.num_kv_heads, config.head_dim), "v": (config.num_kv_heads, config.value_dim)}

    def project(self, attn: Attention, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """In memory everything is (B, T, heads, width)."""
        c = attn.config
        q, k, v = attn.q_proj(x_BTD), attn.k_proj(x_BTD), attn.v_proj(x_BTD)
        if c.qk_norm == "width":
            q, k = attn.q_norm(q), attn.k_norm(k)
        q, k = q.unflatten(-1, (-1, c.head_dim)), k.unflatten(-1, (-1, c.head_dim))
        if c.qk_norm == "head":
            q, k = attn.q_norm(q), attn.k_norm(k)
        v = v.unflatten(-1, (-1, c.value_dim))
        return q.transpose(1, 2), {"k": k.transpose(1, 2), "v": v.transpose(1, 2)}

    def expand(self, attn: Attention, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return slots["k"], slots["v"]


BASES: Registry[Base] = Registry("base")
for _name in ("gqa", "mha", "mqa"):
    BASES.add(_name, GroupedBase())
