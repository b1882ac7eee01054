"""Names of what mechanisms add: for AdamW groups (no weight decay) and for PEFT (trained and saved whole)."""

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


def mix_names(model: nn.Module) -> list[str]:
    """What the model's mechanisms add to its attention (mixes, convolutions, ...), for `modules_to_save` of PEFT.

    Adapters such as LoRA leave everything else of a model as it is, so that without this the added parts neither
    train nor are saved. Every name is a module's inside an attention: ["q_mix", "k_mix"], or ["head_q.0", "head_q.1"].
    """
    names = [
        path
        for attention in model.modules()
        if isinstance(attention, Attention)
        for child in attention.simulating
        for path, module in attention.get_submodule(child).named_modules(prefix=child)
        if next(module.parameters(recurse=False), None) is not None
    ]
    return list(dict.fromkeys(names))
