"""Base mla: multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). `headloom.mechanism.mla` is its page."""

from __future__ import annotations

import dataclasses
import math
from types import MappingProxyType
from typing import Annotated

import torch
from torch import Tensor, nn

from headloom.contract.bases.base import BASES, PROJECTIONS, Base, no_norm, one_of_each
from headloom.contract.common import FILLED, CommonOptions, Filled, need
from headloom.contract.layer import Layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentOptions(CommonOptions):
    """The options of base mla."""

    latent_dim: Annotated[Filled[int], "C: the width of the latent, at most D. None: 4 K"] = FILLED
    q_rank: Annotated[int | None, "the width of the queries' own latent. None: they have none"] = None
    plain_dim: Annotated[Filled[int], "K_n: features of a head that do not rotate. None: K"] = FILLED
    rotary_dim: Annotated[Filled[int], "K_r: features of a head that rotate, even. None: K / 2, even"] = FILLED


class LatentBase(Base[LatentOptions]):
    """Keys and values of all heads from one latent. A cache stores the latent c (1, C) after its norm, and the rotary
    key k_r (1, K_r) that all heads share. Queries and keys stand as [rotary ; plain], K_r + K_n wide."""

    options = LatentOptions
    tiny = MappingProxyType({"latent_dim": 11, "rotary_dim": 4, "plain_dim": 7, "q_rank": 5})
    settles = ("num_kv_heads", "qk_norm", "rotary_dim")
    turned = "k_r"

    def check_heads(self, config: CommonOptions) -> None:
        one_of_each(config)

    def complete(self, config: LatentOptions) -> None:
        D, K = config.hidden_size, config.head_dim
        config.fill("rotary_dim", 2 * math.ceil(K / 4))  # also without rotary: the width of the key all heads share
        config.fill("plain_dim", K)
        config.fill("latent_dim", min(4 * K, D))
        no_norm(config)
        for name in ("latent_dim", "q_rank"):
            value = getattr(config, name)
            need(value is None or value <= D, f"{name} must be at most hidden_size {D}, not {value}: it narrows x")

    def query_dim(self, config: LatentOptions) -> int:
        """K_r + K_n."""
        return config.rotary_dim + config.plain_dim

    def turned_width(self, config: LatentOptions) -> tuple[str, int]:
        return "rotary_dim", config.rotary_dim

    def build(self, attn: Layer[LatentOptions]) -> None:
        c = attn.config
        linear = PROJECTIONS[c.projection]
        width = c.num_heads * self.query_dim(c)
        if c.q_rank is None:
            attn.q_proj = linear(c.hidden_size, width, bias=c.qkv_bias)
        else:
            attn.q_down = linear(c.hidden_size, c.q_rank, bias=c.qkv_bias)
            attn.q_norm = nn.RMSNorm(c.q_rank, eps=c.norm_eps)
            attn.q_up = linear(c.q_rank, width, bias=False)
        attn.kv_down = linear(c.hidden_size, c.latent_dim + c.rotary_dim, bias=c.qkv_bias)
        attn.kv_norm = nn.RMSNorm(c.latent_dim, eps=c.norm_eps)
        attn.kv_up = linear(c.latent_dim, c.num_heads * (c.plain_dim + c.value_dim), bias=False)

    def slots(self, config: LatentOptions) -> dict[str, tuple[int, int]]:
        return {"c": (1, config.latent_dim), "k_r": (1, config.rotary_dim)}

    def project(self, attn: Layer[LatentOptions], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        c = attn.config
        q = attn.q_proj(x_BTD) if c.q_rank is None else attn.q_up(attn.q_norm(attn.q_down(x_BTD)))
        latent, k_r = attn.kv_down(x_BTD).split((c.latent_dim, c.rotary_dim), -1)
        slots = {"c": attn.kv_norm(latent).unsqueeze(1), "k_r": k_r.unsqueeze(1)}
        return q.unflatten(-1, (-1, self.query_dim(c))).transpose(1, 2), slots

    def expand(self, attn: Layer[LatentOptions], slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        c = attn.config
        up = attn.kv_up(slots["c"].squeeze(1)).unflatten(-1, (c.num_heads, -1))  # (B, S, H, K_n + V)
        k_n, v = up.split((c.plain_dim, c.value_dim), -1)
        k_r = slots["k_r"].transpose(1, 2).expand(-1, -1, c.num_heads, -1)
        return torch.cat((k_r, k_n), -1).transpose(1, 2), v.transpose(1, 2)


BASES.add("mla", LatentBase())
