"""DeltaFormer. arXiv:2505.19488.

The delta rule with a softmax kernel: before attention, a token takes from its value what the tokens before it already
hold for its key.

    u_t = v_t - beta_t sum_{j<t} softmax_{j<t}(k_t . k_j / sqrt K) u_j        per kv head g, u (B, G, T, V)
    o_h = softmax(q_h k_g^T / sqrt K) u_g, causal, g = h // (H / G);  out = concat_h(o_h) W_O

The sum runs strictly over earlier tokens (paper); where it is empty, at a document's first token say, u = v.
beta = W_beta x + b, (B, G, T), no activation. (I + diag(beta) P) U = V is a unit triangular system and solved by
blocks of tokens (`headloom.ops.delta`): memory O(T).

Ours: beta_proj starts at zero, which is exactly the base, so a graft keeps its function; grouped heads (G < H);
rotary turns q and k before both stages, qk_norm comes before it; windows, padding and documents hold in both stages,
so through u a token also feels what its window has left behind; `scale` is that of both stages, softcap, dropout and
`score` are of the second only; beta_proj is never ternary. Causal only. Scalings whose frequencies change with length
are refused: a u once remembered is not solved again.

Parameters: the base's and D G + G. FLOPs: O(T^2); the first stage costs as much as the scores of G heads of width K,
values V. Cache per token: k and u, G (K + V).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from headloom.contract.attention import Attention
from headloom.contract.common import need
from headloom.contract.config import AttentionConfig
from headloom.contract.handles import Whole
from headloom.contract.maps import Maps
from headloom.ops import delta
from headloom.ops.cache import Cache, Seen
from headloom.ops.masks import Visibility, refuse
from headloom.ops.rotary import LENGTH_DEPENDENT


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaFormerConfig(AttentionConfig):
    """As `AttentionConfig`; causal, and without the rotary scalings "dynamic" and "longrope"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        need(self.causal, "deltaformer is causal only (u_t is made of earlier u): for an encoder use mha or gqa")
        kind = (self.rope_scaling or {}).get("rope_type")
        need(
            kind not in LENGTH_DEPENDENT,
            f"deltaformer cannot turn by rope_scaling '{kind}', whose frequencies change as the sequence grows while "
            "remembered values stay: use linear, yarn or llama3 scaling, or none",
        )


class DeltaFormer(Attention[DeltaFormerConfig]):
    """DeltaFormer: values corrected by what earlier tokens hold for their key, then causal attention."""

    name = "deltaformer"
    title = "DeltaFormer"
    paper = "arXiv:2505.19488"
    summary = "values corrected by a softmax delta rule before causal attention"
    config_cls = DeltaFormerConfig

    def build_heads(self) -> None:
        self.beta_proj = nn.Linear(self.config.hidden_size, self.config.num_kv_heads)

    @torch.no_grad()
    def reset_heads(self) -> None:
        self.beta_proj.weight.zero_()
        self.beta_proj.bias.zero_()

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        c = self.config
        return {"k": (c.num_kv_heads, c.head_dim), "u": (c.num_kv_heads, c.value_dim)}

    # Steps -------------------------------------------------------------------------------------------------------

    def project(self, x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q, slots = super().project(x_BTD)
        return q, {**slots, "beta": self._beta(x_BTD)}

    def remember(self, new: Seen, cache: Cache | None, update: bool, visible: Callable[[Seen], Visibility]) -> Seen:
        """v becomes u: solved for this call's tokens, read for the cached ones."""
        k, v, beta = new.slots["k"], new.slots["v"], new.slots["beta"]
        new = dataclasses.replace(new, slots={"k": k, "u": v})
        seen = super().remember(new, cache, False, visible)
        u = self._solve(seen.slots["k"], seen.slots["u"], beta, _looking_back(visible(seen), k.device))
        if cache is None or update:
            return super().remember(dataclasses.replace(new, slots={"k": k, "u": u}), cache, update, visible)
        past = seen.slots["u"][:, :, : seen.slots["u"].shape[2] - u.shape[2]]
        return dataclasses.replace(seen, slots={"k": seen.slots["k"], "u": torch.cat((past, u), 2)})

    def read(self, seen: Seen, length: int | None) -> Whole:
        return Whole(seen.slots["k"], seen.slots["u"])

    def _beta(self, x_BTD: Tensor) -> Tensor:
        beta_BTG: Tensor = self.beta_proj(x_BTD)
        return beta_BTG.transpose(1, 2)

    def _solve(self, k_BGSK: Tensor, v_BGSV: Tensor, beta_BGT: Tensor, visibility: Visibility) -> Tensor:
        return delta.solve(k_BGSK, v_BGSV, beta_BGT, visibility, self._scale(k_BGSK))

    @torch.no_grad()
    def maps(self, x_BTD: Tensor, **call: Any) -> Maps:
        """Patterns are those over u; effective is over this call's v (and the cached u): A (I + diag(beta) P)^-1."""
        found = super().maps(x_BTD, **call)
        ready = self._prepare(x_BTD, **{**call, "update_cache": False})
        k = self.expand(ready.handle)[0]
        B, G, S, _ = k.shape
        units = torch.eye(S, dtype=found.patterns.dtype, device=x_BTD.device).expand(B, G, S, S)
        k, beta = k.to(units.dtype), self._beta(x_BTD).to(units.dtype)
        solved = self._solve(k, units, beta, _looking_back(ready.visibility, k.device))
        u = torch.cat((units[:, :, : ready.visibility.past], solved), 2)
        assert found.effective is not None
        return Maps(found.patterns, found.effective @ u.unsqueeze(1))


def _looking_back(visibility: Visibility, device: torch.device) -> Visibility:
    """The same visibility, stated causally. Raises HeadloomError if it shows a query a later token."""
    refuse(
        visibility.looks_ahead(device),
        "deltaformer cannot serve a mask in which a token sees a later one: a value is corrected by the tokens before "
        "it only. Give a mask without later tokens, or use mha or gqa",
    )
    return dataclasses.replace(visibility, causal=True)
