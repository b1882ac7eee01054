"""What a trained model leaves besides its numbers: a checksum of its weights, and its learned mixes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headloom.core.files import replaced
from headloom.ops.mixing import Mix


def checksum(weights: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, type, shape and bytes of every tensor, by name: equal if and only if all bits are.

    >>> checksum({"a": torch.zeros(2)}) == checksum({"a": torch.zeros(2)}) != checksum({"a": -torch.zeros(2)})
    True
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        plain = tensor.detach().cpu().contiguous()
        digest.update(f"{name}\0{plain.dtype}\0{tuple(plain.shape)}\0".encode())
        digest.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def mixing_weights(model: nn.Module) -> list[str]:
    """Names of the weights that mix heads."""
    return [f"{path}.weight" for path, module in model.named_modules() if isinstance(module, Mix)]


def save_mixes(path: Path, names: list[str], weights: Mapping[str, Tensor]) -> None:
    """The mixes as float32 arrays in an .npz, keyed by the parameter's name; no file if there are none."""
    if not names:
        return
    with replaced(path) as file:
        np.savez(file, **{name: weights[name].detach().float().cpu().numpy() for name in names})  # type: ignore[arg-type]
