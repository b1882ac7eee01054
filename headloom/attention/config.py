"""What every mechanism can be told (mechanisms.md in one table: the fields' comments)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, Self

from headloom.core.config import Config
from headloom.core.errors import HeadloomError


def need(condition: bool, message: str) -> None:
    if not condition:
        raise HeadloomError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Sizes and options common to all mechanisms; None fields are filled in when built.

    Args:
        hidden_size: D. num_heads: H. num_kv_heads: G, must divide H (None: H).
        head_dim: K, free (None: D / H). value_dim: V, width of a value head (None: K).
        causal: key index <= query index. window: W in real tokens, oneself included, or None.
        dropout: on attention weights, in training.
        qkv_bias, out_bias: biases of the projections.
        qk_norm: RMSNorm of queries and keys before rotation and mixing, per "head" or over the full "width".
        rope_theta: base of the rotary frequencies, None = no rotary. rotary_dim: rotated features (None: K).
        rope_scaling: Hugging Face's mapping, {"rope_type": "yarn", ...}.
        softcap: scores become softcap tanh(scores / softcap).
        projection: "linear", or "bit" for ternary BitLinear projections.
        base: how queries, keys and values come from x, and what a cache remembers.
        score: "softmax"; "identity" (scores as they are) and "hard" (equal weight on a row's maxima) serve the theory.
        scale: of the scores (None: 1 / sqrt(width of the query actually scored)).
    Raises:
        HeadloomError: a value of the wrong type, a size that does not divide, an unknown name.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    causal: bool = True
    window: int | None = None
    dropout: float = 0.0
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "width"] | None = None
    norm_eps: float = 1e-6
    rope_theta: float | None = 10000.0
    rotary_dim: int | None = None
    rope_scaling: dict | None = None
    softcap: float | None = None
    projection: Literal["linear", "bit"] = "linear"
    base: str = "gqa"
    score: Literal["softmax", "identity", "hard"] = "softmax"
    scale: float | None = None

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa")
    default_kv_heads: ClassVar[str] = "num_heads"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "value_dim", "window", "rotary_dim"):
            value = getattr(self, name)
            need(value is None or value >= 1, f"{name} must be at least 1, not {value}")
        need(self.base in self.bases, f"base must be one of {', '.join(self.bases)}, not '{self.base}'")
        H = self.num_heads
        self._fill("num_kv_heads", self._kv_heads())
        G = self.num_kv_heads or 0
        need(H % G == 0, f"num_kv_heads must divide num_heads, came {G} and {H}")
        if self.base == "mha":
            need(G == H, f"base 'mha' has as many key/value heads as heads ({H}), not {G}: use base 'gqa'")
        if self.base == "mqa":
            need(G == 1, f"base 'mqa' has one key/value head, not {G}: use base 'gqa'")
        if self.head_dim is None:
            need(
                self.hidden_size % H == 0,
                f"hidden_size {self.hidden_size} is no multiple of num_heads {H}: give head_dim, or sizes that divide",
            )
        self._fill("head_dim", self.hidden_size // H)
        K = self.head_dim or 0
        self._fill("value_dim", K)
        if self.rope_theta is None:
            need(self.rotary_dim is None, f"rotary_dim {self.rotary_dim} has no meaning with rope_theta None")
            need(self.rope_scaling is None, "rope_scaling has no meaning with rope_theta None")
        else:
            need(self.rope_theta > 0, f"rope_theta must be above 0 (or None = no rotary), not {self.rope_theta}")
            self._fill("rotary_dim", K)
            turned = self.rotary_dim or 0
            need(
                turned <= K and turned % 2 == 0,
                f"rotary_dim must be even and at most head_dim {K}, not {self.rotary_dim}: "
                "give an even rotary_dim, or rope_theta None for no rotary",
            )
            scaling = self.rope_scaling
            need(scaling is None or "rope_type" in scaling, f"rope_scaling needs 'rope_type', came {scaling}")
        need(0 <= self.dropout < 1, f"dropout must be in [0, 1), not {self.dropout}")
        need(self.softcap is None or self.softcap > 0, f"softcap must be above 0 or None, not {self.softcap}")
        need(self.norm_eps > 0, f"norm_eps must be above 0, not {self.norm_eps}")

    def _kv_heads(self) -> int:
        return 1 if self.base == "mqa" else self.num_heads

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def exact(self) -> bool:
        """Whether a fresh module computes what its base with plain heads would (with dropout 0)."""
        return True

    @classmethod
    def graft_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that make a graft start as the attention it replaces, beside those that were given."""
        return {}

    @property
    def group(self) -> int:
        """Query heads per key/value head, H / G."""
        assert self.num_kv_heads is not None
        return self.num_heads // self.num_kv_heads

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A small config for tests; sizes differ wherever divisibility allows."""
        return cls(**{"hidden_size": 13, "num_heads": 6, "num_kv_heads": 2, "head_dim": 10, **changes})
