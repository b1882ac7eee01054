"""2-simplicial attention ("Fast and Simplex"). arXiv:2507.02754.

Every query attends to pairs of keys. Per query head h and kv head g = h // (H / G), q, k1, k2 of width K, v1, v2 of V:

    logit_ijk = (1 / sqrt K) sum_l q_il k1_jl (k2_kl + 1/K)
    S_i = softmax of logit_i over the pairs (j, k), i - W1 < j <= i and i - W2 < k <= i
    o_i = sum_jk S_ijk (v1_j * (v2_k + 1));  out = concat_h(o_h) W_O

The trilinear form, the joint softmax and both windows are the paper's; 1/K and 1 added to k2 and v2 are its code's.
With k2 + 1/K = v2 + 1 = 1 it is exactly mha (of the first window). No rotary: a common shift of positions would change
the logit, so rope_theta must be None.

Computed without a T^3 tensor (ours; `headloom.ops.simplicial`): for each of the W2 offsets of k a pass of fused
attention with the queries q * k2, merged by log-sum-exp. Ours too: grouped heads; k2 has a norm of its own under
qk_norm; `window` narrows both windows; an encoder (causal=False) has two-sided windows, |i - j| < W1 and |i - k| < W2,
as everywhere here; both keys must be visible (documents, padding, masks). `scale`, softcap and `score` are of the
joint logits, dropout of the joint weights.

k1 and v1 are `k_proj` and `v_proj`. Parameters: D H (K + V) + 2 D G (K + V). FLOPs: O(T W1 W2), those of W2 attentions
of window W1. Cache per token: k1, k2, v1, v2 (before 1/K and 1 are added), 2 G (K + V).
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.bases import PROJECTIONS
from headloom.contract.common import need
from headloom.contract.config import AttentionConfig
from headloom.contract.handles import Whole
from headloom.contract.maps import Maps
from headloom.ops import simplicial
from headloom.ops.cache import Seen
from headloom.ops.masks import Visibility


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimplicialConfig(AttentionConfig):
    """As `AttentionConfig`, without rotary, and what follows."""

    rope_theta: float | None = None
    first_window: Annotated[int | None, "W1: the last tokens in which the first key may stand. None: all"] = 512
    second_window: Annotated[int, "W2: those in which the second key may stand, at most W1; the cost grows with it"] = (
        32
    )

    without: ClassVar[tuple[str, ...]] = ("rope_theta", "rope_scaling", "rotary_dim")

    def __post_init__(self) -> None:
        need(
            self.rope_theta is None,
            f"simplicial has no rotary embedding (a common shift of positions would change its logits), but rope_theta "
            f"{self.rope_theta} came: give rope_theta None",
        )
        super().__post_init__()
        first, second = self.first_window, self.second_window
        need(first is None or first >= 1, f"first_window must be at least 1 or None (all tokens), not {first}")
        need(second >= 1, f"second_window must be at least 1, not {second}")
        need(
            first is None or second <= first,
            f"second_window {second} is wider than first_window {first}: swap them (the two keys have equal roles)",
        )

    @property
    def exact(self) -> bool:
        return False

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return super().tiny(**{"first_window": 64, "second_window": 3, **changes})


class Simplicial(Attention[SimplicialConfig]):
    """2-simplicial attention: a joint softmax over pairs of keys from two windows."""

    name = "simplicial"
    title = "2-simplicial attention"
    paper = "arXiv:2507.02754"
    summary = "trilinear attention over pairs of keys, in a long and a short window"
    config_cls = SimplicialConfig

    k2_proj: nn.Module
    v2_proj: nn.Module

    def build_heads(self) -> None:
        c = self.config
        linear = PROJECTIONS[c.projection]
        self.k2_proj = linear(c.hidden_size, c.num_kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v2_proj = linear(c.hidden_size, c.num_kv_heads * c.value_dim, bias=c.qkv_bias)
        if c.qk_norm is not None:
            heads = 1 if c.qk_norm == "head" else c.num_kv_heads
            self.k2_norm = nn.RMSNorm(heads * c.head_dim, eps=c.norm_eps)

    @torch.no_grad()
    def reset_heads(self) -> None:
        for module in (self.k2_proj, self.v2_proj, *([self.k2_norm] if self.config.qk_norm is not None else [])):
            if isinstance(module, nn.Linear | nn.RMSNorm):
                module.reset_parameters()

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        c = self.config
        key, value = (c.num_kv_heads, c.head_dim), (c.num_kv_heads, c.value_dim)
        return {"k1": key, "k2": key, "v1": value, "v2": value}

    # Steps -------------------------------------------------------------------------------------------------------

    def project(self, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        c = self.config
        q, slots = super().project(x_BTD)
        k2, v2 = self.k2_proj(x_BTD), self.v2_proj(x_BTD).unflatten(-1, (-1, c.value_dim))
        if c.qk_norm == "width":
            k2 = self.k2_norm(k2)
        k2 = k2.unflatten(-1, (-1, c.head_dim))
        if c.qk_norm == "head":
            k2 = self.k2_norm(k2)
        return q, {"k1": slots["k"], "k2": k2.transpose(1, 2), "v1": slots["v"], "v2": v2.transpose(1, 2)}

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        return slots

    def read(self, seen: Seen, length: int | None) -> Whole:
        """(B, 2 G, S, K) and (B, 2 G, S, V): the first keys' heads, then the second keys'."""
        s = seen.slots
        k2, v2 = s["k2"] + 1 / self.config.head_dim, s["v2"] + 1
        return Whole(torch.cat((s["k1"], k2), 1), torch.cat((s["v1"], v2), 1))

    def core(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        c = self.config
        first, second = self._windows(visibility)
        (k1, k2), (v1, v2) = k.chunk(2, 1), v.chunk(2, 1)
        return simplicial.attend(
            q,
            k1,
            k2,
            v1,
            v2,
            first,
            second=second,
            scale=self._scale(q),
            kind=c.score,
            softcap=c.softcap,
            dropout=c.dropout if self.training else 0.0,
        )

    def _windows(self, visibility: Visibility) -> tuple[Visibility, int]:
        """What the first key sees, and the second window: the config's, within the call's."""
        first = [w for w in (self.config.first_window, visibility.window) if w is not None]
        second = min(self.config.second_window, *first) if first else self.config.second_window
        return dataclasses.replace(visibility, window=min(first, default=None)), second

    without_weights = "a query weighs pairs of tokens"

    @torch.no_grad()
    def maps(self, x_BTD: Tensor, **call: Any) -> Maps:
        """Patterns (B, 2 H, T, S): the H heads' weights of the first key, summed over the second, then the reverse.
        No effective map: values enter as products."""
        ready, c = self._prepare(x_BTD, **{**call, "update_cache": False}), self.config
        first, second = self._windows(ready.visibility)
        k1, k2 = self.expand(ready.handle)[0].chunk(2, 1)
        joint, places, _ = simplicial.weigh(
            ready.q, k1, k2, first, second, self._scale(ready.q), kind=c.score, softcap=c.softcap
        )
        over_first = joint.sum(3).flatten(1, 2)
        ends = joint.sum(-1).flatten(1, 2).transpose(-1, -2)  # (B, H, T, c)
        over_second = torch.zeros_like(over_first)
        over_second.scatter_add_(-1, places.T.expand_as(ends), ends)
        return Maps(torch.cat((over_first, over_second), 1), None)
