"""Bases: how q, k, v come from x, and what of a token a cache remembers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from headloom.core.registry import Registry
from headloom.ops.bit import BitLinear, PackedBitLinear
from headloom.ops.factors import product
from headloom.ops.mixing import mix_heads

if TYPE_CHECKING:
    from headloom.contract.attention import Attention

PROJECTIONS = {"linear": nn.Linear, "bit": BitLinear, "packed": PackedBitLinear}


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

    def mixed(
        self, attn: Attention, slots: dict[str, Tensor], k_weight: Tensor, v_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k and v of mixed heads, weights (mixed heads, G)."""
        k, v = self.expand(attn, slots)
        return mix_heads(k_weight, k), mix_heads(v_weight, v)

    def build_output(self, attn: Attention) -> None:
        """Create what reads the concatenated heads on `attn`."""
        c = attn.config
        attn.o_proj = PROJECTIONS[c.projection](attn.merged_width, c.hidden_size, bias=c.out_bias)

    def output(self, attn: Attention, heads_BTW: Tensor) -> Tensor:
        """The concatenated heads (B, T, merged_width) -> (B, T, D)."""
        return attn.o_proj(heads_BTW)


class GroupedBase(Base):
    """Grouped queries (Ainslie et al. 2023, arXiv:2305.13245): H query heads, G key/value heads.

    q_h = W_Q,h x, k_g = W_K,g x, v_g = W_V,g x; query head h reads kv head h // (H / G). G = H is multi-head
    attention (Vaswani et al. 2017), G = 1 multi-query attention (Shazeer 2019).
    """

    turned = "k"

    def build(self, attn: Attention) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        attn.q_proj = linear(c.hidden_size, c.query_heads * c.head_dim, bias=c.qkv_bias)
        attn.k_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        attn.v_proj = linear(c.hidden_size, c.num_kv_heads * c.value_dim, bias=c.qkv_bias)
        if c.qk_norm is not None:
            heads = (1, 1) if c.qk_norm == "head" else (c.query_heads, c.num_kv_heads)
            attn.q_norm = nn.RMSNorm(heads[0] * c.head_dim, eps=c.norm_eps)
            attn.k_norm = nn.RMSNorm(heads[1] * c.head_dim, eps=c.norm_eps)

    def slots(self, config: Any) -> dict[str, tuple[int, int]]:
        return {"k": (config.num_kv_heads, config.head_dim), "v": (config.num_kv_heads, config.value_dim)}

    def project(self, attn: Attention, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
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

    def split(self, attn: Attention, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q (B, T, H, K), k (B, T, G, K), v (B, T, G, V), before their norms."""
        c = attn.config
        q, k, v = (getattr(attn, name)(x_BTD) for name in self.inputs)
        widths = c.head_dim, c.head_dim, c.value_dim
        q, k, v = (x.unflatten(-1, (-1, width)) for x, width in zip((q, k, v), widths, strict=True))
        return q, k, v

    def expand(self, attn: Attention, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return slots["k"], slots["v"]


class LatentBase(Base):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): `headloom.mechanism.mla` is its page.

    Queries and keys stand as [rotary ; plain], K_r + K_n wide. Remembers the latent c (1, C) after its norm and the
    rotary key k_r (1, K_r) that all heads share.
    """

    turned = "k_r"

    def build(self, attn: Attention) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        width = c.num_heads * c.query_dim
        if c.q_rank is None:
            attn.q_proj = linear(c.hidden_size, width, bias=c.qkv_bias)
        else:
            attn.q_down = linear(c.hidden_size, c.q_rank, bias=c.qkv_bias)
            attn.q_norm = nn.RMSNorm(c.q_rank, eps=c.norm_eps)
            attn.q_up = linear(c.q_rank, width, bias=False)
        attn.kv_down = linear(c.hidden_size, c.latent_dim + c.rotary_dim, bias=c.qkv_bias)
        attn.kv_norm = nn.RMSNorm(c.latent_dim, eps=c.norm_eps)
        attn.kv_up = linear(c.latent_dim, c.num_heads * (c.plain_dim + c.value_dim), bias=False)

    def slots(self, config: Any) -> dict[str, tuple[int, int]]:
        return {"c": (1, config.latent_dim), "k_r": (1, config.rotary_dim)}

    def project(self, attn: Any, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        c = attn.config
        q = attn.q_proj(x_BTD) if c.q_rank is None else attn.q_up(attn.q_norm(attn.q_down(x_BTD)))
        latent, k_r = attn.kv_down(x_BTD).split((c.latent_dim, c.rotary_dim), -1)
        slots = {"c": attn.kv_norm(latent).unsqueeze(1), "k_r": k_r.unsqueeze(1)}
        return q.unflatten(-1, (-1, c.query_dim)).transpose(1, 2), slots

    def expand(self, attn: Any, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        c = attn.config
        up = attn.kv_up(slots["c"].squeeze(1)).unflatten(-1, (c.num_heads, -1))  # (B, S, H, K_n + V)
        k_n, v = up.split((c.plain_dim, c.value_dim), -1)
        k_r = slots["k_r"].transpose(1, 2).expand(-1, -1, c.num_heads, -1)
        return torch.cat((k_r, k_n), -1).transpose(1, 2), v.transpose(1, 2)


class FactorBase(Base):
    """Tensor products (arXiv:2501.06425): `headloom.mechanism.tpa` is its page.

    value_h = (1/R) sum_r A[r, h] B[r]. Remembers the factors of k and v: A (R, H), B (R, K), positions turning B.
    """

    turned = "k_b"

    def build(self, attn: Attention) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        ranks = {"k": (c.k_rank, c.head_dim), "v": (c.v_rank, c.value_dim)}
        if c.kv_only:
            attn.q_proj = linear(c.hidden_size, c.num_heads * c.head_dim, bias=c.qkv_bias)
        else:
            ranks = {"q": (c.q_rank, c.head_dim), **ranks}
        for letter, (rank, width) in ranks.items():
            attn.add_module(f"{letter}_a", linear(c.hidden_size, rank * c.num_heads, bias=c.qkv_bias))
            attn.add_module(f"{letter}_b", linear(c.hidden_size, rank * width, bias=c.qkv_bias))

    def slots(self, config: Any) -> dict[str, tuple[int, int]]:
        c = config
        k, v = c.k_rank, c.v_rank
        return {"k_a": (k, c.num_heads), "k_b": (k, c.head_dim), "v_a": (v, c.num_heads), "v_b": (v, c.value_dim)}

    def project(self, attn: Any, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        c = attn.config

        def factor(name: str, rank: int) -> Tensor:
            return getattr(attn, name)(x_BTD).unflatten(-1, (rank, -1)).transpose(1, 2)

        if c.kv_only:
            q = attn.q_proj(x_BTD).unflatten(-1, (-1, c.head_dim)).transpose(1, 2)
        else:
            q = product(factor("q_a", c.q_rank), factor("q_b", c.q_rank))
        return q, {name: factor(name, rank) for name, (rank, _) in self.slots(c).items()}

    def expand(self, attn: Attention, slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return product(slots["k_a"], slots["k_b"]), product(slots["v_a"], slots["v_b"])

    def mixed(
        self, attn: Attention, slots: dict[str, Tensor], k_weight: Tensor, v_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Heads are mixed in the A factors, R numbers a head instead of K."""
        k_a = mix_heads(k_weight, slots["k_a"].transpose(1, 3)).transpose(1, 3)
        v_a = mix_heads(v_weight, slots["v_a"].transpose(1, 3)).transpose(1, 3)
        return product(k_a, slots["k_b"]), product(v_a, slots["v_b"])


BASES: Registry[Base] = Registry("base")
for _name in ("gqa", "mha", "mqa"):
    BASES.add(_name, GroupedBase())
BASES.add("mla", LatentBase())
BASES.add("tpa", FactorBase())
