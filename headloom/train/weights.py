"""What a trained model leaves besides its numbers: a checksum of its weights, and its learned mixes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from headloom.contract.pictures import Picture
from headloom.core.files import replaced
from headloom.mechanism import Attention
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


def pictures(model: nn.Module) -> dict[str, Picture]:
    """Parameter's name in the model -> how it is shown, of every layer's attention."""
    return {
        f"{path}.{picture.weight}": picture
        for path, module in model.named_modules()
        if isinstance(module, Attention)
        for picture in module.pictures()
    }


def values(model: nn.Module, shown: Iterable[str]) -> dict[str, np.ndarray]:
    """What the named parameters are now, as float32 copies."""
    weights = model.state_dict()
    return {name: weights[name].detach().float().cpu().numpy().copy() for name in shown}


def save_pictures(
    path: Path, shown: Mapping[str, Picture], before: Mapping[str, np.ndarray], weights: Mapping[str, Tensor]
) -> None:
    """An .npz with five arrays for each name: <name>/start and <name>/end as float32 matrices, before and after
    training, <name>/rows and <name>/columns as texts, and <name>/axes, what those are. No file if there are none."""
    if not shown:
        return
    arrays = {}
    for name, picture in shown.items():
        size = len(picture.rows), len(picture.columns)
        arrays[f"{name}/start"] = before[name].reshape(size)
        arrays[f"{name}/end"] = weights[name].detach().float().cpu().numpy().reshape(size)
        arrays[f"{name}/rows"], arrays[f"{name}/columns"] = np.array(picture.rows), np.array(picture.columns)
        arrays[f"{name}/axes"] = np.array([picture.down, picture.across])
    with replaced(path) as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]


def save_mixes(path: Path, names: list[str], weights: Mapping[str, Tensor]) -> None:
    """The mixes as float32 arrays in an .npz, keyed by the parameter's name; no file if there are none."""
    if not names:
        return
    with replaced(path) as file:
        np.savez(file, **{name: weights[name].detach().float().cpu().numpy() for name in names})  # type: ignore[arg-type]
