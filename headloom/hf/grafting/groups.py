"""Names of what mechanisms add: for AdamW groups (no weight decay) and for PEFT (trained and saved whole)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from headloom.core.errors import HeadloomError, need_module
from headloom.mechanism import Attention


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
    need_module(model)
    if type(weight_decay) not in (int, float) or not 0 <= weight_decay < float("inf"):
        raise HeadloomError(f"weight_decay must be a number of at least 0, not {weight_decay!r}")
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
    need_module(model)
    names = [
        path
        for child, added in _added(model)
        for path, module in added.named_modules(prefix=child)
        if next(module.parameters(recurse=False), None) is not None
    ]
    return list(dict.fromkeys(names))


def mix_groups(model: nn.Module, weight_decay: float, mix_learning_rate: float) -> list[dict[str, Any]]:
    """`parameter_groups`, and what `mix_names` names in groups of its own with that "lr"."""
    mixes = {id(p) for _, added in _added(model) for p in added.parameters()}
    groups = []
    for group in parameter_groups(model, weight_decay):
        rest = [p for p in group["params"] if id(p) not in mixes]
        apart = [p for p in group["params"] if id(p) in mixes]
        groups.append({**group, "params": rest})
        if apart:
            groups.append({**group, "params": apart, "lr": mix_learning_rate})
    return groups


def _added(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that mechanisms add to their attentions, by their names in these."""
    for attention in model.modules():
        if isinstance(attention, Attention):
            for child in attention.simulating:
                yield child, attention.get_submodule(child)
