"""Rotary position embedding (Su et al. 2021) in Hugging Face's half-split layout: feature i pairs with i + K/2.

[x1, x2] -> [x1 cos - x2 sin, x2 cos + x1 sin] with angles position * theta^(-2i/K). Tables are float32 or wider
whatever the model's type: a bfloat16 table tells apart only a third of 2048 positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError

# provider(scaling, theta, dim, length) -> (inverse frequencies (dim/2,), attention factor)
Provider = Callable[[dict[str, Any], float, int, "int | None"], "tuple[Tensor, float]"]
_PROVIDERS: list[Provider] = []
LENGTH_DEPENDENT = ("dynamic", "longrope")  # their frequencies change with the sequence's length


def register_scalings(provider: Provider) -> None:
    """Give the scaling types beyond "default" and "linear". The floor that knows transformers registers its own."""
    _PROVIDERS[:] = [provider]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Tables for `dim` rotated features. `scaling`: a Hugging Face mapping with "rope_type", or None."""

    theta: float
    dim: int
    scaling: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.scaling is not None and "rope_type" not in self.scaling:
            raise HeadloomError(f"rope_scaling needs the key 'rope_type', came with {sorted(self.scaling)}")

    @property
    def length_dependent(self) -> bool:
        """Whether the frequencies change as the sequence grows."""
        return self.scaling is not None and self.scaling["rope_type"] in LENGTH_DEPENDENT

    def frequencies(self, length: int | None, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
        """Inverse frequencies (dim/2,) and the attention factor (YaRN and longrope scale cos and sin by it)."""
        kind = "default" if self.scaling is None else self.scaling["rope_type"]
        if kind in ("default", "linear"):
            exponents = torch.arange(0, self.dim, 2, dtype=dtype, device=device) / self.dim
            factor = float(self.scaling["factor"]) if self.scaling and kind == "linear" else 1.0
            return self.theta**-exponents / factor, 1.0
        if not _PROVIDERS:
            raise HeadloomError(
                f"rope_scaling '{kind}' needs transformers' definitions: import headloom, not its parts"
            )
        frequencies, factor = _PROVIDERS[0](self.scaling or {}, self.theta, self.dim, length)
        return frequencies.to(device=device, dtype=dtype), float(factor)

    def tables(
        self, positions: Tensor, dtype: torch.dtype, *, length: int | None = None, factor: bool = True
    ) -> tuple[Tensor, Tensor]:
        """cos, sin of shape (*positions.shape, dim). `factor=False` leaves the attention factor out (a second turn)."""
        wide = torch.promote_types(dtype, torch.float32)
        frequencies, attention_factor = self.frequencies(length, wide, positions.device)
        angles = positions.to(wide).unsqueeze(-1) * frequencies
        angles = torch.cat((angles, angles), -1)
        scale = attention_factor if factor else 1.0
        return angles.cos() * scale, angles.sin() * scale


def rotate(x_BHTK: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the first `dim` features; the rest pass. Tables are (T, dim) or (B, T, dim)."""
    cos, sin = (table.unsqueeze(-3) if table.dim() == 3 else table for table in tables)
    dim = cos.shape[-1]
    x, rest = x_BHTK[..., :dim].to(cos.dtype), x_BHTK[..., dim:]
    x1, x2 = x.chunk(2, -1)
    turned = (x * cos + torch.cat((-x2, x1), -1) * sin).to(x_BHTK.dtype)
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
