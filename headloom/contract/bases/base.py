"""What a base is, and the registry of them."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Generic, TypeVar

from torch import Tensor, nn

from headloom.contract.common import CommonOptions, need
from headloom.contract.layer import Layer
from headloom.core.registry import Registry
from headloom.ops.bit import BitLinear, PackedBitLinear
from headloom.ops.mixing import mix_heads

C = TypeVar("C", bound=CommonOptions)

PROJECTIONS: Mapping[str, type[nn.Linear] | type[BitLinear] | type[PackedBitLinear]] = {
    "linear": nn.Linear,
    "bit": BitLinear,
    "packed": PackedBitLinear,
}
"""What `projection` stands for: each takes (inputs, outputs, bias=)."""


class Base(abc.ABC, Generic[C]):
    """Where q, k and v come from, and what of a token the cache stores. C: the config class that has its options.

    A base has two sides. To a config it says what its options mean: which there are (`options`), how those that were
    left out are filled in, and what is refused. To a module it adds its projections, and makes of x the queries and
    the slots that a cache keeps, and of these keys and values again.
    """

    #: the config class whose own fields are this base's options
    options: ClassVar[type[CommonOptions]] = CommonOptions
    #: the options of a small config for tests
    tiny: Mapping[str, Any] = MappingProxyType({})
    #: fields of `CommonOptions` that it settles itself, whatever a model's config says of its own attention
    settles: tuple[str, ...] = ()
    #: the slot that a position rotates, in its first `rotary_dim` features
    turned: str

    # To a config --------------------------------------------------------------------------------------------------

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of its options; one of all mechanisms is among them where it means something else here."""
        own = {} if self.options is CommonOptions else inspect.get_annotations(self.options)
        return tuple(f.name for f in dataclasses.fields(self.options) if f.name in own and f.name != "base")

    def kv_heads(self, config: CommonOptions) -> int:
        """G where it is not given: H."""
        return config.num_heads

    def check_heads(self, config: CommonOptions) -> None:
        """Refuse a number of key/value heads that it cannot have. Raises HeadloomError."""

    def complete(self, config: C) -> None:
        """Fill its options in, and refuse what it cannot do. head_dim is known here, value_dim where it was given.

        Raises: HeadloomError: options that do not go together.
        """

    def query_dim(self, config: C) -> int:
        """The width of a head's query and key: K."""
        return config.head_dim

    def turned_width(self, config: C) -> tuple[str, int]:
        """The option that says how wide a key is that positions rotate, and its value."""
        return "head_dim", config.head_dim

    # To a module --------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def build(self, attn: Layer[C]) -> None:
        """Create the projections on `attn`."""

    @abc.abstractmethod
    def slots(self, config: C) -> dict[str, tuple[int, int]]:
        """The slots of one token in the cache: name -> (heads, width)."""

    @abc.abstractmethod
    def project(self, attn: Layer[C], x_BTD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """q (B, H, T, K) and the slots (B, heads, T, width), normalised, not yet rotated."""

    @abc.abstractmethod
    def expand(self, attn: Layer[C], slots: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """k (B, G, S, K) and v (B, G, S, V) from the slots; linear in the rotated slot, so rotation passes through."""

    def mixed(
        self, attn: Layer[C], slots: dict[str, Tensor], k_weight: Tensor, v_weight: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k (B, M, S, K) and v (B, M, S, V) of M mixes of the heads, by weights (M, G)."""
        k, v = self.expand(attn, slots)
        return mix_heads(k_weight, k), mix_heads(v_weight, v)

    def build_output(self, attn: Layer[C]) -> None:
        """Create what reads the concatenated heads on `attn`."""
        c = attn.config
        attn.o_proj = PROJECTIONS[c.projection](attn.merged_width, c.hidden_size, bias=c.out_bias)

    def output(self, attn: Layer[C], heads_BTW: Tensor) -> Tensor:
        """The concatenated heads (B, T, merged_width) -> (B, T, D)."""
        out_BTD: Tensor = attn.o_proj(heads_BTW)
        return out_BTD


BASES: Registry[Base[Any]] = Registry("base")


def options_of(bases: Iterable[str]) -> dict[str, list[str]]:
    """The options that some bases have, and the other ones lack: option -> the bases of `bases` that have it."""
    found: dict[str, list[str]] = {}
    for name in bases:
        for field in BASES[name].fields:
            if field not in CommonOptions.__dataclass_fields__:
                found.setdefault(field, []).append(name)
    return found


def one_of_each(config: CommonOptions) -> None:
    """Refuse G other than H."""
    H, G = config.num_heads, config.num_kv_heads
    need(G == H, f"base '{config.base}' has as many key/value heads as heads ({H}), not {G}: use base 'gqa'")


def no_norm(config: CommonOptions) -> None:
    """Refuse a norm of queries and keys."""
    need(
        config.qk_norm is None,
        f"qk_norm needs every head's keys, which base '{config.base}' does not remember: leave it out, or base 'gqa'",
    )
