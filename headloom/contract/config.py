"""The config of a mechanism: the options of all, those of its base, and its own, checked together when it is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

from headloom.contract.bases import BASES
from headloom.contract.bases.base import options_of
from headloom.contract.common import CommonOptions, need
from headloom.contract.folding import Folding
from headloom.core.errors import HeadloomError, near

MODEL_NAMES = ("num_attention_heads", "num_key_value_heads")
"""Sizes as the config of a whole transformers model names them."""


class NoSuchField(HeadloomError, AttributeError):
    """A name that a config does not have; `hasattr` and `getattr` with a default work as ever."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionConfig(CommonOptions):
    """The config of a mechanism: `CommonOptions`, the options of the bases that it can stand on (its class inherits
    them), and its own. `headloom list NAME` prints what each means, with its values and costs.

    Fields that are None are filled in when built, where that is said. One that belongs to another base stays None.

    Raises:
        HeadloomError: a value of the wrong type, a size that does not divide, an unknown name.
    """

    bases: ClassVar[tuple[str, ...]] = ("gqa", "mha", "mqa")
    """The bases that it can stand on."""
    without: ClassVar[tuple[str, ...]] = ()
    """Fields a model gives to all its layers that mean nothing here (rotary, where tokens have no position)."""

    def __post_init__(self) -> None:
        super().__post_init__()
        owners = options_of(self.bases)
        sizes = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "value_dim", "window", "rotary_dim")
        for name in (*sizes, *owners):
            value = getattr(self, name)
            need(value is None or value is False or value >= 1, f"{name} must be at least 1, not {value}")
        need(self.base in self.bases, f"base must be one of {', '.join(self.bases)}, not '{self.base}'")
        for name, have in owners.items():
            need(
                getattr(self, name) is None or self.base in have,
                f"{name} belongs to base {' or '.join(have)}, not to base '{self.base}': leave it out",
            )
        self._complete()
        self._check_rotary()
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

    def _complete(self) -> None:
        """Fill in the numbers of heads and their widths, and what the base adds."""
        base, H = BASES[self.base], self.num_heads
        self.fill("num_kv_heads", self._kv_heads())
        G = self.num_kv_heads
        need(H % G == 0, f"num_kv_heads must divide num_heads, came {G} and {H}")
        base.check_heads(self)
        if getattr(self, "head_dim") is None:  # noqa: B009  an int once it is filled in
            need(
                self.hidden_size % H == 0,
                f"hidden_size {self.hidden_size} is no multiple of num_heads {H}: give head_dim, or sizes that divide",
            )
        self.fill("head_dim", self.hidden_size // H)
        base.complete(self)
        self.fill("value_dim", self.head_dim)

    def _check_rotary(self) -> None:
        base = BASES[self.base]
        if self.rope_theta is None:
            need(
                self.rotary_dim is None or "rotary_dim" in base.fields,
                f"rotary_dim {self.rotary_dim} has no meaning with rope_theta None",
            )
            need(self.rope_scaling is None, "rope_scaling has no meaning with rope_theta None")
            return
        need(self.rope_theta > 0, f"rope_theta must be above 0 (or None = no rotary), not {self.rope_theta}")
        name, width = base.turned_width(self)
        self.fill("rotary_dim", width)
        need(
            self.rotary_dim <= width and self.rotary_dim % 2 == 0,
            f"rotary_dim must be even and at most {name} {width}, not {self.rotary_dim}: "
            "give an even rotary_dim, or rope_theta None for no rotary",
        )
        scaling = self.rope_scaling
        need(scaling is None or "rope_type" in scaling, f"rope_scaling needs 'rope_type', came {scaling}")

    def _kv_heads(self) -> int:
        """G where it is not given: the base's, unless a mechanism has another usual number."""
        return BASES[self.base].kv_heads(self)

    @property
    def query_dim(self) -> int:
        """Width of a base head's query and key: K, over base mla K_r + K_n."""
        return BASES[self.base].query_dim(self)

    @property
    def base_fields(self) -> tuple[str, ...]:
        """Options that are the base's: their values follow from which one it is."""
        return BASES[self.base].fields

    @property
    def exact(self) -> bool:
        """Whether a fresh module computes what its base with plain heads would (with dropout 0)."""
        return True

    @property
    def folding(self) -> Folding:
        """Which of its parts merge into plain weights, and why the others do not."""
        if self.projection != "linear":
            return Folding(
                stays={"its projections": f"'{self.projection}' ones quantise what passes, plain ones do not"}
            )
        return self._folding()

    def _folding(self) -> Folding:
        """As `folding`, of ordinary projections: a mechanism overrides it together with `Attention.fold_into`."""
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
        settled = {*cls.without, *BASES[base].settles}
        return {name: value for name, value in facts.items() if name not in settled}

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        """A small config for tests; sizes differ wherever divisibility allows."""
        sizes = BASES[changes.get("base", cls.base)].tiny
        return cls(**{"hidden_size": 13, "num_heads": 6, "head_dim": 10, **sizes, **changes})
