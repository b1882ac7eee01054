"""Talking-heads attention. Shazeer et al. 2020, arXiv:2003.02436.

Heads talk twice, before and after the softmax (paper; its two mixes with as many heads inside as outside):

    J_h(n, m) = scale q_h(n) . k_g(m),  g = h // (H / G)         logits of head h, (B, H, T, S)
    A_i = softmax_m(mask + sum_h logit_mix[i, h] J_h)            logit_mix.weight (H, H)
    W_o = sum_i weight_mix[o, i] A_i                             weight_mix.weight (H, H)
    o_o = sum_m W_o(n, m) v_g(m),  g = o // (H / G);  concatenate, W_O

Ours: a soft-cap bounds the mixed logits; dropout acts on the mixed weights; over a base with G < H the mixes stand
between the H query heads, so head o takes its values from kv head o // (H / G); both mixes start as the identity, which
is exactly the base (a known implementation adds the mix to an identity and so doubles the logits at the start).

It needs every head's scores at once, so it has no fused path: it runs in query blocks, each made again in the backward,
and memory stays one block's. The rows of W_o sum to sum_i weight_mix[o, i] and may be negative. Extra parameters 2 H^2;
operations per visible pair H (K + V) + 2 H^2 multiply-adds; cache per token: the base's, G (K + V) over gqa. Over mla
and tpa each call makes keys and values of all tokens from what is remembered (no absorbed and no factored form).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from headloom.contract.attention import Attention
from headloom.contract.bases import FactorOptions, LatentOptions
from headloom.contract.config import AttentionConfig
from headloom.ops.mixing import Mix, mix_scores


@dataclasses.dataclass(frozen=True, kw_only=True)
class TalkingHeadsConfig(LatentOptions, FactorOptions, AttentionConfig):
    """As `AttentionConfig` with the options of bases mla and tpa; a fresh module is exactly its base."""

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa", "mla", "tpa")


class TalkingHeads(Attention[TalkingHeadsConfig]):
    """Talking-heads attention: logits and weights mixed over heads."""

    name = "talking_heads"
    title = "Talking-heads attention"
    paper = "arXiv:2003.02436"
    summary = "heads mix their logits before the softmax and their weights after it"
    config_cls = TalkingHeadsConfig

    def build_heads(self) -> None:
        H = self.config.num_heads
        self.logit_mix, self.weight_mix = Mix(H, H), Mix(H, H)

    @torch.no_grad()
    def reset_heads(self) -> None:
        for mix in (self.logit_mix, self.weight_mix):
            torch.nn.init.eye_(mix.weight)

    def on_logits(self, logits_BHTS: Tensor) -> Tensor:
        return mix_scores(self.logit_mix.weight, logits_BHTS)

    def on_weights(self, weights_BHTS: Tensor) -> Tensor:
        return mix_scores(self.weight_mix.weight, weights_BHTS)

    def row_sums(self) -> Tensor:
        return self.weight_mix.weight.sum(1)
