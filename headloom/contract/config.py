"""What every mechanism can be told (mechanisms.md in one table: the fields' comments)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from headloom.contract.folding import Folding
from headloom.core.config import Config
from headloom.core.errors import HeadloomError, near

#: sizes that belong to a base: field -> the bases that have it; with any other base they stay None
BASE_FIELDS: dict[str, tuple[str, ...]] = {
    "q_rank": ("mla", "tpa"),
    "latent_dim": ("mla", "mfa", "mfa_kr"),
    "plain_dim": ("mla",),
    "k_rank": ("tpa",),
    "v_rank": ("tpa",),
    "kv_only": ("tpa",),
}

#: what a model's config cannot say about an attention on a base: its name, or how it makes keys, does
_SETTLED: dict[str, tuple[str, ...]] = {
    "mha": ("num_kv_heads",),
    "mqa": ("num_kv_heads",),
    "mla": ("num_kv_heads", "qk_norm", "rotary_dim"),
    "tpa": ("num_kv_heads", "qk_norm"),
}

MODEL_NAMES = ("num_attention_heads", "num_key_value_heads")
"""Sizes as the config of a whole transformers model names them."""


class NoSuchField(HeadloomError, AttributeError):
    """A name that a config does not have; `hasattr` and `getattr` with a default work as ever."""


def need(condition: bool, message: str) -> None:
    if not condition:
        raise HeadloomError(message)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(Config):
    """Sizes and options common to all mechanisms. What each means stands beside it; `headloom list NAME` prints that,
    with its values and costs. Fields that are None are filled in when built, where that is said.

    Raises:
        HeadloomError: a value of the wrong type, a size that does not divide, an unknown name.
    """

    hidden_size: Annotated[int, "D: the width of the model"]
    num_heads: Annotated[int, "H: the number of heads"]
    num_kv_heads: Annotated[int | None, "G: key/value heads, a divisor of H. None: the mechanism's usual number"] = None
    head_dim: Annotated[int | None, "K: the width of a head's query and key. None: D / H"] = None
    value_dim: Annotated[int | None, "V: the width of a value head. None: K"] = None
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
    rotary_dim: Annotated[int | None, "how many features of a head rotate, even. None: K; base mla: K / 2, even"] = None
    rope_scaling: Annotated[
        dict | None, "the rotary scaling, as in Hugging Face: {rope_type: linear, factor: 2}. None: none"
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
    q_rank: Annotated[
        int | None, "base mla: the width of the queries' own latent (None: none); tpa: R_q, their factors (None: 6)"
    ] = None
    latent_dim: Annotated[
        int | None, "C: base mla: the width of the latent, at most D (None: 4 K); mfa: of each head (None: 2 K)"
    ] = None
    plain_dim: Annotated[int | None, "base mla: K_n, features of a head that do not rotate. None: K"] = None
    k_rank: Annotated[int | None, "base tpa: R_k, factors of the keys, at most min(H, K). None: 2"] = None
    v_rank: Annotated[int | None, "base tpa: R_v, factors of the values, at most min(H, V). None: 2"] = None
    kv_only: Annotated[bool | None, "base tpa: queries are ordinary, not made of factors. None: false"] = None

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa")
    default_kv_heads: ClassVar[str] = "num_heads"
    without: ClassVar[tuple[str, ...]] = ()
    """Fields a model gives to all its layers that mean nothing here (rotary, where tokens have no position)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "value_dim", "window", "rotary_dim")
        for name in (*sizes, *BASE_FIELDS):
            value = getattr(self, name)
            need(value is None or value is False or value >= 1, f"{name} must be at least 1, not {value}")
        need(self.base in self.bases, f"base must be one of {', '.join(self.bases)}, not '{self.base}'")
        for name, owners in BASE_FIELDS.items():
            need(
                getattr(self, name) is None or self.base in owners,
                f"{name} belongs to base {' or '.join(owners)}, not to base '{self.base}': leave it out",
            )
        H = self.num_heads
        self._fill("num_kv_heads", self._kv_heads())
        G = self.num_kv_heads or 0
        need(H % G == 0, f"num_kv_heads must divide num_heads, came {G} and {H}")
        if self.base in ("mha", "mla", "tpa"):
            need(G == H, f"base '{self.base}' has as many key/value heads as heads ({H}), not {G}: use base 'gqa'")
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
        if self.base == "mla":
            self._complete_mla()
        if self.base == "tpa":
            self._complete_tpa()
        if self.rope_theta is None:
            need(
                self.rotary_dim is None or self.base == "mla",
                f"rotary_dim {self.rotary_dim} has no meaning with rope_theta None",
            )
            need(self.rope_scaling is None, "rope_scaling has no meaning with rope_theta None")
        else:
            need(self.rope_theta > 0, f"rope_theta must be above 0 (or None = no rotary), not {self.rope_theta}")
            name, width = self._turned_width()
            self._fill("rotary_dim", width)
            turned = self.rotary_dim or 0
            need(
                turned <= width and turned % 2 == 0,
                f"rotary_dim must be even and at most {name} {width}, not {self.rotary_dim}: "
                "give an even rotary_dim, or rope_theta None for no rotary",
            )
            scaling = self.rope_scaling
            need(scaling is None or "rope_type" in scaling, f"rope_scaling needs 'rope_type', came {scaling}")
        need(0 <= self.dropout < 1, f"dropout must be in [0, 1), not {self.dropout}")
        need(self.softcap is None or self.softcap > 0, f"softcap must be above 0 or None, not {self.softcap}")
        need(self.norm_eps > 0, f"norm_eps must be above 0, not {self.norm_eps}")

    if not TYPE_CHECKING:  # a type checker would take every name for known

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            way_out = near(name, [field.name for field in dataclasses.fields(self)])
            if name in MODEL_NAMES:
                way_out = (
                    " What computes heads of its own beside a transformers attention (PEFT's LLaMA-Adapter) cannot "
                    "stand on Headloom's: adapt the projections (LoRA) or the prompt (prompt tuning)"
                )
            raise NoSuchField(f"{type(self).__name__} has no '{name}'.{way_out}")

    def _turned_width(self) -> tuple[str, int]:
        """The field that says how wide a key is that positions rotate, and its value."""
        if self.base == "mla":
            return "rotary_dim", self.rotary_dim or 0
        return "head_dim", self.head_dim or 0

    def _complete_mla(self) -> None:
        D, K = self.hidden_size, self.head_dim or 0
        self._fill("rotary_dim", 2 * math.ceil(K / 4))  # also without rotary: the width of the key all heads share
        self._fill("plain_dim", K)
        self._fill("latent_dim", min(4 * K, D))
        self._no_norm()
        for name in ("latent_dim", "q_rank"):
            value = getattr(self, name)
            need(value is None or value <= D, f"{name} must be at most hidden_size {D}, not {value}: it narrows x")

    def _complete_tpa(self) -> None:
        self._fill("kv_only", False)
        self._no_norm()
        bounds = {"q_rank": (6, self.head_dim), "k_rank": (2, self.head_dim), "v_rank": (2, self.value_dim)}
        if self.kv_only:
            need(self.q_rank is None, f"q_rank {self.q_rank} has no meaning with kv_only: its queries have no factors")
            del bounds["q_rank"]
        for name, (default, width) in bounds.items():
            most = min(self.num_heads, width or 0)
            self._fill(name, min(default, most))
            value = getattr(self, name)
            need(value <= most, f"{name} must be at most {most}, the smaller of heads and their width, not {value}")

    def _no_norm(self) -> None:
        need(
            self.qk_norm is None,
            f"qk_norm needs every head's keys, which base '{self.base}' does not remember: leave it out, or base 'gqa'",
        )

    def _kv_heads(self) -> int:
        return 1 if self.base == "mqa" else self.num_heads

    def _fill(self, name: str, value: Any) -> None:
        if getattr(self, name) is None:
            object.__setattr__(self, name, value)

    @property
    def query_dim(self) -> int:
        """Width of a base head's query and key: K, over base mla K_r + K_n."""
        assert self.head_dim is not None
        return self.head_dim if self.base != "mla" else (self.rotary_dim or 0) + (self.plain_dim or 0)

    @property
    def base_fields(self) -> set[str]:
        """Options whose values follow from the base."""
        own = {name for name, owners in BASE_FIELDS.items() if self.base in owners}
        return own | {"rotary_dim"} if self.base == "mla" else own

    @property
    def exact(self) -> bool:
        """Whether a fresh module computes what its base with plain heads would (with dropout 0)."""
        return True

    @property
    def folding(self) -> Folding:
        """Which part of it plain weights can say, and why they cannot say the rest."""
        if self.projection != "linear":
            return Folding(
                stays={"its projections": f"'{self.projection}' ones quantise what passes, plain ones do not"}
            )
        return self._folding()

    def _folding(self) -> Folding:
        return Folding(stays={"its heads": "they are no linear map of one token's queries, keys, values or outputs"})

    @classmethod
    def graft_defaults(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that make a graft start as the attention it replaces, beside those that were given."""
        return {}

    @classmethod
    def adopted(cls, facts: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
        """What this mechanism takes over from a model's own attention where a model is built around it.

        facts: fields of `AttentionConfig`, as the model's config says them. given: the mechanism's options. Left out
        are fields that mean nothing here, and those that the base settles itself (mha has G = H in any model).
        """
        base = given.get("base", cls.base)
        settled = {*cls.without, *_SETTLED.get(base, ())}
        return {name: value for name, value in facts.items() if name not in settled}

    @property
    def query_heads(self) -> int:
        """Heads that q_proj gives and that are scored; H unless a mechanism scores several per head."""
        return self.num_heads

    @property
    def group(self) -> int:
        """Query heads per key/value head, H / G."""
        assert self.num_kv_heads is not None
        return self.num_heads // self.num_kv_heads

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A small config for tests; sizes differ wherever divisibility allows."""
        base = changes.get("base", cls.base)
        sizes = {
            "mla": {"latent_dim": 11, "rotary_dim": 4, "plain_dim": 7, "q_rank": 5},
            "tpa": {"q_rank": 5, "k_rank": 2, "v_rank": 3},
        }.get(base, {"num_kv_heads": 2} if base == cls.base else {})
        return cls(**{"hidden_size": 13, "num_heads": 6, "head_dim": 10, **sizes, **changes})
