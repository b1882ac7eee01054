"""Fully Parameterised Bilinear Attention. arXiv:2412.19255.

The upper bound on capacity that the paper of `mfa` measures against. For H channels c, over x (T, D):

    o_i = sum_c softmax_j(x_i W_c x_j^T / sqrt D) x_j U_c      W_c, U_c (D, D)

(paper). Every pair of features has a weight of its own in every channel, and there is no other projection. The bound
takes H = D channels; here H is an option (ours: num_heads unless given; 2 channels have mha's parameters). No rotary: a
turn of x by its position would mix the features that the channels pick apart (rope_theta is None, others are refused).

It is attention with H query heads x W_c of width D and one key and value head, x itself. Weights by name: `q_proj`
W_1 .. W_H, transposed and stacked (H D, D); `o_proj` U_1 .. U_H side by side, transposed (D, H D), since the sum over
channels is what an output projection does. Ours: the biases and norms of q, k, v that other mechanisms may have are
refused, as there is no k or v to have them.

Parameters 2 H D^2. FLOPs O(T^2), the scores of H heads of width D. Cache per token: x, D.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar, Self

from torch import Tensor

from headloom.contract.attention import Attention
from headloom.contract.bases import BASES, PROJECTIONS, Base
from headloom.contract.common import FILLED, CommonOptions, Filled, need
from headloom.contract.config import AttentionConfig
from headloom.contract.layer import Layer


@dataclasses.dataclass(frozen=True, kw_only=True)
class BilinearConfig(AttentionConfig):
    """As `AttentionConfig`, and what follows.

    There is one key and value head, the token itself: head_dim and value_dim are hidden_size, num_kv_heads is 1, and
    rope_theta, qk_norm and qkv_bias cannot be set.
    """

    channels: Annotated[Filled[int], "H: the number of matrices W_c and U_c. None: num_heads, its only meaning"] = (
        FILLED
    )
    rope_theta: float | None = None
    base: str = "bilinear"

    bases: ClassVar[tuple[str, ...]] = ("bilinear",)
    without: ClassVar[tuple[str, ...]] = (
        "num_kv_heads",
        "head_dim",
        "value_dim",
        "qk_norm",
        "qkv_bias",
        "rope_theta",
        "rotary_dim",
        "rope_scaling",
    )

    def __post_init__(self) -> None:
        need(
            self.rope_theta is None,
            f"bilinear attention has no rotary: rope_theta must be None, not {self.rope_theta}",
        )
        if self.head_dim is None:
            object.__setattr__(self, "head_dim", self.hidden_size)
        super().__post_init__()
        D = self.hidden_size
        for name in ("head_dim", "value_dim"):
            value = getattr(self, name)
            need(value == D, f"{name} is hidden_size {D} in bilinear attention, not {value}: leave it out")
        need(
            self.num_kv_heads == 1,
            f"bilinear attention has one key/value head, the token, not {self.num_kv_heads}: leave num_kv_heads out",
        )
        need(self.qk_norm is None, f"bilinear attention norms no keys: qk_norm must be None, not {self.qk_norm!r}")
        self.fill("channels", self.num_heads)
        need(self.query_heads >= 1, f"channels must be at least 1, not {self.channels}")
        need(not self.qkv_bias, "bilinear attention has no q, k, v projections with a bias: qkv_bias must be false")

    @property
    def query_heads(self) -> int:
        return self.num_heads if self.channels is None else self.channels

    @property
    def exact(self) -> bool:
        return False

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return cls(**{"hidden_size": 7, "num_heads": 2, "channels": 3, **changes})


class TokenBase(Base[BilinearConfig]):
    """q_c = x W_c; the key and the value are the token itself, which is what a cache remembers."""

    options = BilinearConfig
    turned = "x"

    def kv_heads(self, config: CommonOptions) -> int:
        return 1

    def build(self, attn: Layer[BilinearConfig]) -> None:
        c = attn.config
        attn.q_proj = PROJECTIONS[c.projection](c.hidden_size, c.query_heads * c.hidden_size, bias=False)

    def slots(self, config: BilinearConfig) -> dict[str, tuple[int, int]]:
        return {"x": (1, config.hidden_size)}

    def project(self, attn: Layer[BilinearConfig], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        q_BTHD = attn.q_proj(x_BTD).unflatten(-1, (-1, attn.config.hidden_size))
        return q_BTHD.transpose(1, 2), {"x": x_BTD[:, None]}

    def expand(self, attn: Layer[BilinearConfig], slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return slots["x"], slots["x"]


BASES.add("bilinear", TokenBase())


class Bilinear(Attention[BilinearConfig]):
    """Fully parameterised bilinear attention: a D x D matrix of scores and one of values for every channel."""

    name = "bilinear"
    title = "Fully Parameterised Bilinear Attention"
    paper = "arXiv:2412.19255"
    summary = "a weight for every pair of features in every channel: the bound on capacity"
    config_cls = BilinearConfig

    @property
    def merged_width(self) -> int:
        return self.config.query_heads * self.config.hidden_size

    def effective_map(self, patterns: Tensor, x_BTD: Tensor) -> Tensor | None:
        """(B, H, 1, T, S): out_c = effective[c, 0] x."""
        return patterns.unsqueeze(2)
