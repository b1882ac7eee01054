"""What is recorded of a trained model's weights: a checksum, and the learned mixes."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

import numpy as np
import torch
from torch import Tensor, nn

from headloom.contract.pictures import Picture
from headloom.mechanism import Attention
from headloom.ops.mixing import Mix
from headloom.records.arrays import WeightPicture


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
    """Parameter name in the model -> how a report shows it, for the attention of every layer."""
    return {
        f"{path}.{picture.weight}": picture
        for path, module in model.named_modules()
        if isinstance(module, Attention)
        for picture in module.pictures()
    }


def values(weights: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, np.ndarray]:
    """The current values of the named parameters, as float32 copies."""
    return {name: weights[name].detach().float().cpu().numpy().copy() for name in names}


def drawn(
    shown: Mapping[str, Picture], before: Mapping[str, np.ndarray], weights: Mapping[str, Tensor]
) -> dict[str, WeightPicture]:
    """The named parameters before and after training, as named matrices for a report."""
    found = {}
    for name, picture in shown.items():
        size = len(picture.rows), len(picture.columns)
        found[name] = WeightPicture(
            start=before[name].reshape(size),
            end=weights[name].detach().float().cpu().numpy().reshape(size),
            rows=tuple(picture.rows),
            columns=tuple(picture.columns),
            down=picture.down,
            across=picture.across,
        )
    return found
