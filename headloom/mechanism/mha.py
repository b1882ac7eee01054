"""Multi-head attention. Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762.

o_h = softmax(q_h k_h^T / sqrt K) v_h;  out = concat_h(o_h) W_O. Cache per token: 2 H K.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Self

from headloom.contract.attention import Attention
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding


@dataclasses.dataclass(frozen=True, kw_only=True)
class MHAConfig(AttentionConfig):
    """As `AttentionConfig`, with G = H."""

    base: str = "mha"
    bases: ClassVar[tuple[str, ...]] = ("mha",)

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return super().tiny(**{"num_heads": 3, "num_kv_heads": None, **changes})

    def _folding(self) -> Folding:
        return Folding()


class MHA(Attention[MHAConfig]):
    """Multi-head attention: every head its own keys and values."""

    name = "mha"
    title = "Multi-head attention"
    paper = "arXiv:1706.03762"
    summary = "every head has its own queries, keys and values"
    config_cls = MHAConfig
