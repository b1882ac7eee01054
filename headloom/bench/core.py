"""The scores alone: the `core` of a layer, on the queries, keys and values that a call of the layer hands to it.

What `bench speed --part scores` times. Projections, rotations, mixes, merge and output stand outside; what the core
does by itself (taking the difference of two attentions, say) stands inside, in time and in FLOPs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headloom.bench.subjects import Subject
from headloom.core.errors import HeadloomError
from headloom.costs.count import count_steps
from headloom.mechanism import Attention, AttentionConfig, build_from_config
from headloom.ops.scores import flop_convention


@torch.no_grad()
def handed(layer: Attention, x_BTD: Tensor) -> tuple[Any, ...]:
    """What the layer's call with x hands to its core: q, k, v, visibility. Raises HeadloomError if it has no core."""
    taken: list[tuple[Any, ...]] = []
    plain = layer.core

    def core(*given: Any) -> Tensor:
        taken.append(given)
        return plain(*given)

    object.__setattr__(layer, "core", core)
    try:
        layer(x_BTD)
    finally:
        object.__delattr__(layer, "core")
    if len(taken) != 1:
        raise HeadloomError(
            f"{layer.name} scores in a way of its own, which cannot be taken out of its layer: measure the layer"
        )
    return taken[0]


def scores_of(each: Subject, tokens: int) -> Subject:
    """The subject with the FLOPs of its cores, the mean of its layers. Raises HeadloomError where tokens meet outside
    the core too, or there is none."""
    configs: list[AttentionConfig] = [layer.config for layer in each.module.layers]  # type: ignore[union-attr]
    known = {text: core_flops(config, tokens) for text, config in {repr(c): c for c in configs}.items()}
    found = [known[repr(config)] for config in configs]
    mean = {name: sum(flops[name] for flops in found) / len(found) for name in ("full", "exact")}
    return dataclasses.replace(each, flops=mean)


def core_flops(config: AttentionConfig, tokens: int) -> dict[str, int]:
    """FLOPs of the core, forward for one sequence, in both conventions, counted on the meta device."""
    with torch.device("meta"):
        layer = build_from_config(config)
    if count_steps(layer, tokens, "full")["remember"]:
        raise HeadloomError(
            f"in {layer.name} tokens meet before they are scored too (in what it remembers), so its scores alone are "
            "not what its attention takes: measure the layer"
        )
    given = handed(layer, torch.empty(1, tokens, config.hidden_size, device="meta"))
    found = {}
    for name in ("full", "exact"):
        with torch.no_grad(), flop_convention(name), FlopCounterMode(display=False) as counter:
            layer.core(*given)
        found[name] = counter.get_total_flops()
    return found


def call(each: Subject, x_BTD: Tensor, mode: str) -> Callable[[], object]:
    """A call of the cores of all layers, one after the other, or of each with its backward pass, down to q, k, v (and
    weights that the core has). Every layer's q, k, v come from the same x."""
    given = [(layer, *handed(layer, x_BTD)) for layer in each.module.layers]  # type: ignore[union-attr]
    if mode == "forward":

        def forward() -> None:
            with torch.no_grad():
                for layer, *rest in given:
                    layer.core(*rest)

        return forward

    def backward() -> None:
        for layer, q, k, v, visibility in given:
            leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
            out = layer.core(*leaves, visibility)
            learned = [p for p in layer.parameters() if p.requires_grad]
            torch.autograd.grad(out, [*leaves, *learned], out.detach(), allow_unused=True)

    return backward
