"""Rotary scalings (linear, dynamic, yarn, longrope, llama3, ...) as transformers computes them.

`headloom.ops.rotary` asks a provider for every scaled rotary embedding; `import headloom` registers `provide`. The
frequencies are transformers' own, so a graft of a scaled model turns by exactly the original's angles, and
`FamilyRotary` repeats how a family rounds cosines and sines.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError, unknown
from headloom.ops.rotary import Rotary

# What a scaling dict may carry that is not for the formula itself.
_MAX_POSITIONS = "max_position_embeddings"
_TYPE_KEYS = ("rope_type", "type")


def scaling_types() -> list[str]:
    """The names transformers knows, sorted."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return sorted(ROPE_INIT_FUNCTIONS)


def provide(
    scaling: dict[str, Any], rope_theta: float, rotary_dim: int, length: int | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies (float32, `rotary_dim / 2`) and the attention factor of a scaled rotary embedding.

    `scaling` is transformers' `rope_parameters` (or the older `rope_scaling`); `max_position_embeddings` may stand in
    it. `length` is the longest sequence of this call in positions: `dynamic` and `longrope` change with it.

    Raises: HeadloomError for an unknown type or a missing or impossible value.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope_type = str(scaling.get("rope_type", scaling.get("type")))
    if rope_type not in ROPE_INIT_FUNCTIONS:
        raise unknown("rotary scaling", rope_type, ROPE_INIT_FUNCTIONS)
    parameters = {k: v for k, v in scaling.items() if k not in (_MAX_POSITIONS, *_TYPE_KEYS)}
    # The features that rotate are counted by `rotary_dim` already: a partial factor must not cut them again.
    parameters.update(rope_type=rope_type, rope_theta=rope_theta, partial_rotary_factor=1.0)
    parameters.setdefault("factor", None if rope_type in ("yarn", "longrope") else 1.0)
    most = scaling.get(_MAX_POSITIONS, scaling.get("original_max_position_embeddings"))
    if rope_type in ("llama3", "yarn", "longrope"):
        parameters.setdefault("original_max_position_embeddings", most)
    config = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=rotary_dim,
        hidden_size=rotary_dim,
        num_attention_heads=1,
        max_position_embeddings=most,
        standardize_rope_params=lambda: None,
    )
    seq_len = None if length is None else torch.tensor(length)  # a tensor, as the models give it: other last bits
    try:
        inv_freq, factor = ROPE_INIT_FUNCTIONS[rope_type](config, device=None, seq_len=seq_len)
    except (KeyError, TypeError, ZeroDivisionError) as error:
        named = f"'{error.args[0]}' is missing" if isinstance(error, KeyError) else str(error)
        raise HeadloomError(f"rotary scaling '{rope_type}' cannot be computed from {scaling}: {named}") from error
    return inv_freq, float(factor)


def from_parameters(parameters: dict[str, Any] | None, max_positions: int) -> tuple[float, dict[str, Any] | None]:
    """transformers' `rope_parameters` -> (`rope_theta`, `rope_scaling`) of an `AttentionConfig`.

    The scaling carries `max_position_embeddings`, which `dynamic` and `yarn` need, so that it says everything.
    """
    values = dict(parameters or {})
    theta = float(values.pop("rope_theta", 10000.0))
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    if kind == "default":
        return theta, None
    return theta, {"rope_type": kind, **values, _MAX_POSITIONS: max_positions}


def to_parameters(rope_theta: float | None, rope_scaling: dict[str, Any] | None) -> dict[str, Any]:
    """The inverse of `from_parameters`, for a config we write. No rotary at all is written as the default one: the
    layers' own configs say `rope_theta: null`."""
    values = {k: v for k, v in (rope_scaling or {}).items() if k != _MAX_POSITIONS}
    kind = values.pop("rope_type", None) or values.pop("type", None) or "default"
    return {"rope_type": kind, "rope_theta": 10000.0 if rope_theta is None else float(rope_theta), **values}


@dataclasses.dataclass(frozen=True)
class FamilyRotary(Rotary):
    """Rotary embedding as the families compute it: angles in float32, cos and sin in the type of what they rotate.

    Our own models keep wider tables; a graft must repeat the original's rounding to keep its function.
    """

    #: cos and sin are rounded to the model's type
    rounded: ClassVar[bool] = True
    #: the products are float32 at least
    wide: ClassVar[bool] = False
    #: what is turned is rounded to float32 first, float64 too
    single: ClassVar[bool] = False

    _scaled: tuple[Tensor, float] | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._is_scaled and not self.length_dependent:
            with torch.device("cpu"):  # once: a model may be built on meta, and a compiler cannot look inside
                object.__setattr__(self, "_scaled", provide(self.scaling or {}, self.theta, self.dim))

    @property
    def _is_scaled(self) -> bool:
        return self.scaling is not None and self.scaling["rope_type"] != "default"

    def tables(
        self, positions: Tensor, dtype: torch.dtype, *, length: int | None = None, factor: bool = True
    ) -> tuple[Tensor, Tensor]:
        frequencies, attention_factor = self._family_frequencies(length)
        angles = positions.float().unsqueeze(-1) * frequencies.to(positions.device)
        angles = torch.cat((angles, angles), -1)
        scale = attention_factor if factor else 1.0
        cos, sin = angles.cos() * scale, angles.sin() * scale
        if self.rounded:
            cos, sin = cos.to(dtype), sin.to(dtype)
        last = torch.promote_types(dtype, torch.float32) if self.wide else dtype
        return cos.to(last), sin.to(last)

    def _family_frequencies(self, length: int | None) -> tuple[Tensor, float]:
        if self._is_scaled:
            return self._scaled or provide(self.scaling or {}, self.theta, self.dim, length)
        exponents = torch.arange(0, self.dim, 2, dtype=torch.float) / self.dim
        return 1.0 / (self.theta**exponents), 1.0
