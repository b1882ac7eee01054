"""Grouped-query attention. Ainslie et al. 2023, arXiv:2305.13245.

o_h = softmax(q_h k_g^T / sqrt K) v_g with g = h // (H / G). Cache per token: 2 G K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from headloom.contract.attention import Attention
from headloom.contract.common import need
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding


@dataclasses.dataclass(frozen=True, kw_only=True)
class GQAConfig(AttentionConfig):
    """As `AttentionConfig`; num_kv_heads None takes max(1, H / 4). G = H is refused: that is mha."""

    bases: ClassVar[tuple[str, ...]] = ("gqa",)

    def __post_init__(self) -> None:
        super().__post_init__()
        G, H = self.num_kv_heads, self.num_heads
        need(G != H or H == 1, f"gqa with num_kv_heads = num_heads = {H}: that is mha; give a smaller divisor of {H}")

    @classmethod
    def adopted(cls, facts: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """Not the key/value heads of a model that has as many as heads: that is mha."""
        found = super().adopted(facts, given)
        if found.get("num_kv_heads") == found.get("num_heads"):
            found.pop("num_kv_heads", None)
        return found

    def _kv_heads(self) -> int:
        return max(1, self.num_heads // 4)

    def _folding(self) -> Folding:
        return Folding()


class GQA(Attention[GQAConfig]):
    """Grouped-query attention: H / G query heads share a key/value head."""

    name = "gqa"
    title = "Grouped-query attention"
    paper = "arXiv:2305.13245"
    summary = "groups of query heads share keys and values"
    config_cls = GQAConfig
