"""Multi-query attention. Shazeer 2019, "Fast Transformer Decoding: One Write-Head is All You Need", arXiv:1911.02150.

o_h = softmax(q_h k^T / sqrt K) v. Cache per token: 2 K.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from headloom.contract.attention import Attention
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding


@dataclasses.dataclass(frozen=True, kw_only=True)
class MQAConfig(AttentionConfig):
    """As `AttentionConfig`, with G = 1."""

    base: str = "mqa"
    bases: ClassVar[tuple[str, ...]] = ("mqa",)

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return super().tiny(**{"num_heads": 3, "num_kv_heads": None, **changes})

    def _folding(self) -> Folding:
        return Folding()


class MQA(Attention[MQAConfig]):
    """Multi-query attention: all heads share one key and one value head."""

    name = "mqa"
    title = "Multi-query attention"
    paper = "arXiv:1911.02150"
    summary = "all heads share one key and one value head"
    config_cls = MQAConfig
