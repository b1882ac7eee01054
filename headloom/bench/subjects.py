"""What is measured: a mechanism's layer, one period of a schedule's layers, or a user's own module.

A subject is called with x (B, T, D) and gives (B, T, D). Weights depend on the seed and the subject's sizes alone, so
every measurement at one setting meets the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headloom.bench.asked import Named, Sizes
from headloom.bench.setting import Setting
from headloom.core.errors import HeadloomError
from headloom.costs.count import config_cost
from headloom.mechanism import Attention, AttentionConfig, build_from_config, layer_config
from headloom.mechanism.schedules import pattern_of
from headloom.ops.cache import Cache

DEEP = 1000
"""Layers of a model deep enough for a whole period of any schedule."""


class Layers(nn.Module):
    """Layers one after the other: one period of a schedule, or a single layer."""

    def __init__(self, configs: Sequence[AttentionConfig]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(build_from_config(config, place) for place, config in enumerate(configs))

    def forward(self, x_BTD: Tensor, cache: Cache | None = None) -> Tensor:
        for layer in self.layers:
            x_BTD = layer(x_BTD, cache=cache)
        return x_BTD


class PlainForm(nn.Module):
    """The straightforward form (`headloom.bench.plain`) of a built attention, with its very weights."""

    def __init__(self, attention: Attention) -> None:
        from headloom.bench.plain import plain_form

        super().__init__()
        self.attention, self.form = attention, plain_form(attention)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.form(self.attention, x_BTD)


@dataclasses.dataclass(frozen=True)
class Subject:
    """One thing to measure. layers: how many it has, by which times and FLOPs are divided; flops: forward of a layer
    for one sequence, by convention, None where they are not known; form_of: the label of the variant of which it is
    another form."""

    label: str
    module: nn.Module
    layers: int = 1
    flops: Mapping[str, float] | None = None
    form_of: str | None = None

    @property
    def attention(self) -> Attention | None:
        """The single layer of a mechanism."""
        layers: Any = getattr(self.module, "layers", ())
        return layers[0] if len(layers) == 1 else None


def configs_of(named: Named, sizes: Sizes, tokens: int) -> list[AttentionConfig]:
    """One period of layers in a context of `tokens`. A HeadloomError names the variant whose options do not fit."""
    try:
        pattern = pattern_of(named.mechanism, named.options, num_layers=DEEP, tokens=tokens)
        return [layer_config(name, sizes.given(), options) for name, options in pattern]
    except HeadloomError as error:
        raise HeadloomError(f"{named.label}: {error}") from None


def subject(named: Named, sizes: Sizes, tokens: int, setting: Setting) -> Subject:
    """The subject built on the setting's device, in its type."""
    configs = configs_of(named, sizes, tokens)
    known = {repr(config): config_cost(config, tokens=tokens, dtype=setting.dtype or "float32") for config in configs}
    costs = [known[repr(config)] for config in configs]
    torch.manual_seed(setting.seed)
    return Subject(
        label=named.label,
        module=Layers(configs).to(setting.device, setting.type),
        layers=len(configs),
        flops={
            "full": sum(cost.flops_full for cost in costs) / len(costs),
            "exact": sum(cost.flops_exact for cost in costs) / len(costs),
        },
    )


def plain(each: Subject) -> Subject:
    """The variant's straightforward form; it has the same useful FLOPs. Raises HeadloomError where there is none."""
    attention = each.attention
    if attention is None:
        raise HeadloomError(f"{each.label} is a schedule of layers: only a single mechanism has a straightforward form")
    return Subject(f"{each.label} plain", PlainForm(attention), flops=each.flops, form_of=each.label)


def inputs(batch: int, tokens: int, width: int, setting: Setting) -> Tensor:
    """x (B, T, D), drawn by the seed."""
    generator = torch.Generator().manual_seed(setting.seed)
    return torch.randn(batch, tokens, width, generator=generator).to(setting.device, setting.type)


FACTOR = {"forward": 1, "backward": 3, "step": 3, "train": 3}
"""FLOPs in those of the forward pass: the backward one has two products for each of its."""


def module_call(module: Callable[..., Any], x_BTD: Tensor, mode: str) -> Callable[[], object]:
    """A call that does one forward pass, or one forward and backward pass after which no gradient is left."""
    if mode == "forward":

        def forward() -> object:
            with torch.no_grad():
                return module(x_BTD)

        return forward
    leaf = x_BTD.detach().clone().requires_grad_()
    grad = torch.randn_like(x_BTD)
    learned = [p for p in getattr(module, "parameters", list)() if p.requires_grad]

    def backward() -> object:
        out = first(module(leaf))
        out.backward(grad)
        for tensor in (leaf, *learned):
            tensor.grad = None
        return None

    return backward


def first(out: Any) -> Tensor:
    """The output of a module that may return a tuple."""
    return out[0] if isinstance(out, tuple | list) else out
