"""A mechanism's module where a family expects its attention: called the family's way, named the mechanism's way."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from headloom.attention import layer_config, make_config, mechanisms, taken
from headloom.attention.config import AttentionConfig
from headloom.hf.cache import HFCache
from headloom.hf.config import FAMILY_ROTARY
from headloom.hf.family import Family
from headloom.hf.masks import arriving
from headloom.ops.rotary import Rotary


class GraftedAttention:
    """Mixin before a mechanism's class: `self_attn` of a decoder layer.

    It takes what the layer passes (hidden states, the family's cos and sin, which it does not need, a mask in any
    form, a transformers cache, position ids, whether they only count from 0, documents) and returns (output, None).
    """

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Any = None,
        attention_mask: Any = None,
        cache: Any = None,
        position_ids: Tensor | None = None,
        documents: Tensor | None = None,
        in_order: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        cache = kwargs.get("past_key_values") if cache is None else cache
        view = None if cache is None else HFCache(cache)
        layer: int = self.layer_index  # type: ignore[attr-defined]
        past, static = (0, False) if view is None else (view.length(layer), view.is_static(layer))
        out = super().forward(  # type: ignore[misc]
            hidden_states,
            mask=arriving(attention_mask, past, hidden_states.shape[1], static=static),
            positions=None if in_order else position_ids,
            documents=documents,
            cache=view,
        )
        return out, None


@dataclasses.dataclass(frozen=True)
class FamilyRotary(Rotary):
    """The family's own turning: angles in float32, cos and sin in the type of what they turn.

    Our own models keep wider tables; a graft must repeat the original's rounding to keep its function.
    """

    def tables(
        self, positions: Tensor, dtype: torch.dtype, *, length: int | None = None, factor: bool = True
    ) -> tuple[Tensor, Tensor]:
        frequencies, attention_factor = self._family_frequencies(length)
        angles = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
        angles = torch.cat((angles, angles), -1)
        scale = attention_factor if factor else 1.0
        return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)

    def _family_frequencies(self, length: int | None) -> tuple[Tensor, float]:
        if self.scaling is not None and self.scaling["rope_type"] != "default":
            from headloom.hf.rope import provide

            return provide(self.scaling, self.theta, self.dim, length)
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float) / self.dim
        return 1.0 / (self.theta**exponents), 1.0


def attention_config(family: Family, config: Any, index: int, spec: dict[str, Any]) -> AttentionConfig:
    """The `AttentionConfig` of layer `index`: the family's sizes and switches, and what the spec says besides."""
    common = family.common(config, index)
    options = spec.get("options") or {}
    return layer_config(spec["mechanism"], common, options)


def spec_of(family: Family, config: Any, index: int, made: AttentionConfig, mechanism: str) -> dict[str, Any]:
    """What a config says beyond the family's config: written to disk, so that later defaults change nothing."""
    common = taken(mechanism, family.common(config, index))
    options = {k: v for k, v in made.to_dict().items() if k not in common or common[k] != v}
    return {"mechanism": mechanism, "options": options}


def make_attention(family: Family, config: Any, index: int, spec: dict[str, Any]) -> Any:
    """The module for layer `index`."""
    from headloom.hf.classes import attention_class

    if spec["mechanism"] not in mechanisms():
        make_config(spec["mechanism"])  # raises with the near names
    made = attention_config(family, config, index, spec)
    attention = attention_class(family.name, spec["mechanism"])(made, index)
    if config.headloom.get("rotary", FAMILY_ROTARY) == FAMILY_ROTARY and attention.rotary is not None:
        attention.rotary = FamilyRotary(attention.rotary.theta, attention.rotary.dim, attention.rotary.scaling)
    return attention


@contextlib.contextmanager
def in_width_of(dtype: torch.dtype) -> Iterator[None]:
    """Inside, new tensors are float64 for a float64 model and float32 otherwise: initial values are not rounded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if dtype == torch.float64 else torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
