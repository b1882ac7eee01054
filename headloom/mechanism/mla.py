"""Multi-head Latent Attention (DeepSeek-V2). arXiv:2405.04434.

Keys and values of all heads come from one narrow latent, which is all that a cache remembers.

c_q = RMSNorm(W_DQ x) (q_rank), q_h = W_UQ,h c_q; without q_rank q_h = W_Q,h x: [rotary K_r ; plain K_n] per head
[c ; k_r] = W_DKV x, widths C and K_r; c = RMSNorm(c); k_r is one head that all share
[k_n,h ; v_h] = W_UKV,h c, widths K_n and V; k_h = [k_r ; k_n,h], positions turn the rotary features only (half-split)
o_h = softmax(q_h k_h^T / sqrt(K_n + K_r)) v_h;  out = concat_h(o_h) W_O

Names in the state dict: `q_down, q_norm, q_up` (or `q_proj`), `kv_down`, `kv_norm`, `kv_up`, `o_proj`. Per head q's
rows stand as [rotary ; plain] and kv_up's as [k_n ; v]; kv_down's rows as [c ; k_r].

Paper: K_r = K / 2, C = 4 K, K_n = V = K. Ours: K_r is made even, C is at most D; qkv_bias is on what reads x; with
rope_theta None k_r stays, unturned; qk_norm is refused, since it would need every head's keys. A scaling's attention
factor (YaRN) is on the rotary features, as everywhere here.

Parameters: D q_rank + q_rank + q_rank H (K_n + K_r)  (or D H (K_n + K_r)) + D (C + K_r) + C + C H (K_n + V) + H V D.
FLOPs: scores as mha's at width K_n + K_r. Cache per token: C + K_r.

Absorbed form: q_n . W_UK c = (W_UK^T q_n) . c, and sum_s a_s W_UV c_s = W_UV sum_s a_s c_s, so heads can score against
one key [k_r ; c] and sum one value c without expanding what is remembered. It is the same function, taken when it has
fewer multiply-adds: a few queries over a cache. Quantised (and adapted) projections always expand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, ClassVar, Literal

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.bases import LatentOptions
from headloom.contract.common import need
from headloom.contract.config import AttentionConfig
from headloom.contract.handles import Handle
from headloom.ops.cache import Seen
from headloom.ops.masks import Visibility


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig(LatentOptions, AttentionConfig):
    """As `AttentionConfig` with the options of base mla, and what follows."""

    base: str = "mla"
    absorb: Annotated[
        Literal["auto", "always", "never"],
        "whether queries meet the latents themselves: where cheaper, always or never",
    ] = "auto"

    bases: ClassVar[tuple[str, ...]] = ("mla",)

    def __post_init__(self) -> None:
        super().__post_init__()
        need(
            self.absorb != "always" or self.projection == "linear",
            f"absorb 'always' needs projection 'linear', not '{self.projection}': use absorb 'auto'",
        )

    @classmethod
    def variations(cls) -> list[MLAConfig]:
        return [cls.tiny(q_rank=None)]


@dataclasses.dataclass(frozen=True, eq=False)
class Latents(Handle):
    """What a cache remembers: one latent head c (B, 1, S, C) and the rotated key k_r (B, 1, S, K_r) of all heads."""

    c: Tensor
    k_r: Tensor


class MLA(Attention[MLAConfig]):
    """Multi-head Latent Attention: keys and values from one latent of width C."""

    name = "mla"
    title = "Multi-head Latent Attention"
    paper = "arXiv:2405.04434"
    summary = "keys and values come from one narrow latent, which is all that is remembered"
    config_cls = MLAConfig

    kv_up: nn.Linear

    def read(self, seen: Seen, length: int | None) -> Latents:
        slots = self.turn_late(seen.slots, seen.positions_BS, length)
        return Latents(slots["c"], slots["k_r"])

    def score(self, q: Tensor, handle: Handle, visibility: Visibility) -> Tensor:
        """Absorbed: one key head [k_r ; c] and one value head c meet all queries."""
        c = self.config
        assert isinstance(handle, Latents)
        if not self.absorbs(visibility):
            return super().score(q, handle, visibility)
        weight: Tensor = self.kv_up.weight.unflatten(0, (c.num_heads, -1))
        up_k, up_v = weight[:, : c.plain_dim], weight[:, c.plain_dim :]  # (H, K_n, C), (H, V, C)
        q_r, q_n = q.split((c.rotary_dim, c.plain_dim), -1)
        k = torch.cat((handle.k_r, handle.c), -1)
        latent: Tensor = self.core(torch.cat((q_r, q_n @ up_k), -1), k, handle.c, visibility)
        return latent @ up_v.transpose(1, 2)

    def expand(self, handle: Handle) -> tuple[Tensor, Tensor]:
        assert isinstance(handle, Latents)
        return self.base.expand(self, {"k_r": handle.k_r, "c": handle.c})

    def absorbs(self, visibility: Visibility) -> bool:
        """Whether a call scores against the latents: by multiply-adds per head, all pairs counted."""
        c = self.config
        if type(self.kv_up) is not nn.Linear or c.absorb != "auto":
            return type(self.kv_up) is nn.Linear and c.absorb == "always"
        T, S, C = visibility.T, visibility.S, c.latent_dim
        up, pairs = C * (c.plain_dim + c.value_dim), T * S
        absorbed = T * up + pairs * (c.rotary_dim + 2 * C)
        return absorbed < S * up + pairs * (c.query_dim + c.value_dim)

    def _scale(self, q: Tensor) -> float:
        c = self.config
        return c.scale if c.scale is not None else 1 / math.sqrt(c.query_dim)
