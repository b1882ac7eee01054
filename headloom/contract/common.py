"""The options that every mechanism has: sizes, masks, rotation, scores. What is checked of them stands in `config`."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, Optional, TypeVar

from headloom.core.config import Config
from headloom.core.errors import HeadloomError

T = TypeVar("T")

if TYPE_CHECKING:
    Filled = Annotated[T, "None until the config is built"]
else:
    Filled = Optional
FILLED: Any = None
"""`size: Filled[int] = FILLED` may be left out, or given as None, and has a value once the config is built: it is an
int to type checkers, an int or None to the check of what was given."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommonOptions(Config):
    """Sizes and options common to all mechanisms. What each means stands beside it; a size's meaning begins with its
    letter in formulas."""

    hidden_size: Annotated[int, "D: the width of the model"]
    num_heads: Annotated[int, "H: the number of heads"]
    num_kv_heads: Annotated[Filled[int], "G: key/value heads, a divisor of H. None: the mechanism's usual number"] = (
        FILLED
    )
    head_dim: Annotated[Filled[int], "K: the width of a head's query and key. None: D / H"] = FILLED
    value_dim: Annotated[Filled[int], "V: the width of a value head. None: K"] = FILLED
    causal: Annotated[bool, "a token sees only itself and earlier tokens; false: all tokens, as in an encoder"] = True
    window: Annotated[int | None, "W: a token sees so many tokens, itself included. None: all"] = None
    dropout: Annotated[float, "the share of attention weights set to 0 in training"] = 0.0
    qkv_bias: Annotated[bool, "whether the query, key and value projections have biases"] = False
    out_bias: Annotated[bool, "whether the output projection has a bias"] = False
    qk_norm: Annotated[
        Literal["head", "width"] | None,
        "RMSNorm of queries and keys before rotation: of each head, or over all heads together. None: no norm",
    ] = None
    norm_eps: Annotated[float, "the small number added inside the norms"] = 1e-6
    rope_theta: Annotated[float | None, "the base of the rotary frequencies. None: no rotary embedding"] = 10000.0
    rotary_dim: Annotated[Filled[int], "how many features of a head rotate, even. None: K"] = FILLED
    rope_scaling: Annotated[
        dict[str, Any] | None, "the rotary scaling, as in Hugging Face: {rope_type: linear, factor: 2}. None: none"
    ] = None
    softcap: Annotated[float | None, "scores become softcap tanh(scores / softcap). None: they stay"] = None
    projection: Annotated[
        Literal["linear", "bit", "packed"],
        "ordinary weights; ternary ones (BitLinear); or these as `hl.pack_bits` leaves them, for inference only",
    ] = "linear"
    base: Annotated[str, "how queries, keys and values are made from a token, and what a cache keeps of it"] = "gqa"
    score: Annotated[
        Literal["softmax", "identity", "hard"],
        "what makes weights of scores; identity (none) and hard (equal weight on the largest) are for the theory",
    ] = "softmax"
    scale: Annotated[float | None, "what scores are multiplied by. None: 1 / sqrt(width of a query)"] = None

    @property
    def query_heads(self) -> int:
        """Heads that q_proj gives and that are scored; H unless a mechanism scores several per head."""
        return self.num_heads

    @property
    def group(self) -> int:
        """Query heads per key/value head, H / G."""
        return self.num_heads // self.num_kv_heads

    def fill(self, name: str, value: Any) -> None:
        """Give a field that is None its value: for the config's own making, and its base's part in it."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)


def need(condition: bool, message: str) -> None:
    """Raise HeadloomError(message) unless `condition` holds."""
    if not condition:
        raise HeadloomError(message)
