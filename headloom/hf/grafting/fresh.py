"""The attention that `graft` puts into a layer: on the old one's device, in its type, holding its modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from headloom.core.errors import HeadloomError
from headloom.hf.model.attention import in_width_of, make_attention
from headloom.hf.model.family import Family
from headloom.hf.model.layer_plan import LayerPlan
from headloom.ops.seeding import seeded_by_name


def new_attention(family: Family, plan: LayerPlan, old: nn.Module) -> Any:
    """A layer's new attention, holding the modules of `old`; what it adds starts the same in every call.

    Raises: HeadloomError for a mechanism that cannot take these modules over.
    """
    layout = family.layout
    weight: Any = old.get_submodule(layout.inputs[0]).weight
    with torch.random.fork_rng(devices=[]), in_width_of(weight.dtype), weight.device:
        new = make_attention(family, plan, old)
        if new.base is not layout:
            for name in layout.projections:
                _take(new, name, old.get_submodule(name), plan.index)
        with seeded_by_name(new, plan.index):  # the same graft twice is the same graft
            new.reset_heads()
    new.training = old.training
    shared = set(old.modules())
    for parameter in new.parameters(recurse=False):
        parameter.data = parameter.data.to(weight.dtype)
    for module in new.modules():
        if module not in shared and module is not new:
            module.to(dtype=weight.dtype).train(old.training)
        module._is_hf_initialized = True
    return new


@torch.no_grad()
def _take(new: nn.Module, name: str, projection: Any, index: int) -> None:
    """Move an original projection in: the module itself where ours is a plain Linear of its size, else its weights.

    A mechanism that reads more than the base gives (an o_proj of more columns) finds the original in the first columns
    and spreads it in `reset_heads`.
    """
    ours = getattr(new, name, None)
    theirs = projection.weight
    if (
        not isinstance(ours, nn.Linear)
        or ours.weight.shape[0] != theirs.shape[0]
        or ours.weight.shape[1] < theirs.shape[1]
    ):
        shape = tuple(ours.weight.shape) if isinstance(ours, nn.Linear) else "none"
        raise HeadloomError(
            f"layer {index}'s {name} {tuple(theirs.shape)} does not fit this mechanism's ({shape}): choose options "
            "that keep the projections' sizes"
        )
    if (ours.bias is None) != (projection.bias is None):
        raise HeadloomError(
            f"layer {index}'s {name}: a bias on one side only; leave qkv_bias and out_bias to the model"
        )
    if type(ours) is nn.Linear and ours.weight.shape == theirs.shape:
        setattr(new, name, projection)
    elif ours.weight.shape == theirs.shape:
        ours.weight, ours.bias = theirs, projection.bias
    else:
        ours.weight[:, : theirs.shape[1]] = theirs
        ours.bias = projection.bias
