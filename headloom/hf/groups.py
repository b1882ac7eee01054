"""AdamW groups: what takes weight decay and what does not."""

from __future__ import annotations

from typing import Any

from torch import nn

from headloom.attention import Attention


def no_decay_names(model: nn.Module) -> set[str]:
    """Names of parameters without weight decay: mixes, and everything of one axis (norms, biases).

    Embeddings and projections decay. A tied tensor is named once, by its first name.
    """
    mixes = {
        f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        if isinstance(module, Attention)
        for name in module.no_decay()
    }
    return {name for name, p in model.named_parameters() if name in mixes or p.ndim < 2}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups for AdamW, decayed first; every trainable parameter stands in exactly one, once.

    >>> import torch
    >>> groups = parameter_groups(torch.nn.Linear(3, 2), 0.1)
    >>> [(len(g["params"]), g["weight_decay"]) for g in groups]
    [(1, 0.1), (1, 0.0)]
    """
    spared = no_decay_names(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return [
        {"params": [p for name, p in trained if name not in spared], "weight_decay": weight_decay},
        {"params": [p for name, p in trained if name in spared], "weight_decay": 0.0},
    ]
