"""`graft`: replace the attention of a model in place, keep its weights and (unless allowed otherwise) its function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from headloom.contract.config import AttentionConfig
from headloom.core.errors import HeadloomError
from headloom.hf.grafting.swap import (
    compare,
    compared,
    new_attention,
    outputs_of,
    reference_of,
    revert_on_error,
    swap,
    tolerance,
)
from headloom.hf.model.attention import spec_of
from headloom.hf.model.classes import grafted_class
from headloom.hf.model.config import grafted_config
from headloom.hf.model.family import Family, attentions, family_named
from headloom.hf.model.mixin import Graft
from headloom.hf.places import read_layers
from headloom.mechanism import layer_config, make_config, mechanisms
from headloom.mechanism.schedules import as_spec


@dataclasses.dataclass(frozen=True)
class LayerChange:
    """One replaced layer: its index, the mechanism, and its whole config."""

    index: int
    mechanism: str
    config: AttentionConfig


@dataclasses.dataclass(frozen=True)
class GraftReport:
    """What a graft changed.

    difference: largest absolute difference on a probe batch of what was `compared`: the logits, or the last hidden
    states of a model whose head gives none for each token; relative: over their range; exact: whether it is within
    rounding of the model's type.
    """

    changes: tuple[LayerChange, ...]
    num_layers: int
    parameters_before: int
    parameters_added: int
    difference: float
    relative: float
    exact: bool
    compared: str = "logits"

    def __str__(self) -> str:
        kinds = ", ".join(dict.fromkeys(change.mechanism for change in self.changes))
        share = 100 * self.parameters_added / max(1, self.parameters_before)
        kept = "its function is kept" if self.exact else "its function is NOT kept"
        return (
            f"{kinds} in {len(self.changes)} of {self.num_layers} layers; {self.parameters_added:,} parameters added "
            f"({share:.2f} %); {self.compared} differ by {self.difference:.1e} ({self.relative:.1e} of their range): "
            f"{kept}"
        )


def graft(
    model: Any,
    name: str | None = None,
    *,
    layers: str | int | Iterable[int] | Mapping[Any, Any] | None = None,
    allow_change: bool = False,
    **options: Any,
) -> GraftReport:
    """Replace the attention of `model` in place; q, k, v and o weights stay the same tensors.

    Args:
        name: a mechanism; `options` are its own. Unless said otherwise it starts as the function that was there.
        layers: all (None), "0-3,8", indices, or a mapping of these to a name or (name, options).
        allow_change: accept a graft that changes the model's outputs.
    Returns:
        What changed, the parameters added, and the measured difference on a probe batch.
    Raises:
        HeadloomError: a model that cannot be grafted (already grafted, of an unknown family, on the meta device,
            quantized, or with somebody else's attention), layers out of range, sizes that do not fit, or a spec that
            changes the function without `allow_change`. The model is then exactly as it was.
    """
    family = _check(model)
    plan = _plan(name, layers, options, model.config.num_hidden_layers)
    old = attentions(family, model)
    specs: list[dict[str, Any] | None] = [None] * len(old)
    changes = []
    for index, (mechanism, given) in sorted(plan.items()):
        _check_attention(family, old[index], index)
        made = _config(family, model.config, index, mechanism, given)
        specs[index] = spec_of(family, model.config, index, made, mechanism)
        changes.append(LayerChange(index, mechanism, made))
    config = grafted_config(model.config, specs)
    if not allow_change:
        for change in changes:
            _check_exact(change, AttentionConfig(**family.common(model.config, change.index)))
    fresh = {index: new_attention(family, config, index, specs[index], old[index]) for index in plan}
    before = sum(p.numel() for p in model.parameters())
    what, allowed = compared(family, model), tolerance(family, model)
    with revert_on_error(family, model):
        probe, reference, routes = reference_of(family, model, what)
        swap(family, model, config, fresh)
        got = outputs_of(family, model, probe, what, routes)
        difference, relative = compare(reference, got, probe["attention_mask"].bool())
        exact = relative <= allowed
        if not exact and not allow_change:
            names = ", ".join(dict.fromkeys(change.mechanism for change in changes))
            raise HeadloomError(
                f"{names} as given changes the model: {what} differ by {difference:.1e}, {relative:.1e} of their "
                "range. Leave out what is not the mechanism's own, or pass allow_change=True"
            )
    added = sum(p.numel() for p in model.parameters()) - before
    return GraftReport(tuple(changes), len(old), before, added, difference, relative, exact, what)


# ---- what may be grafted ------------------------------------------------------------------------------------------
def _check(model: Any) -> Family:
    from transformers import PreTrainedModel

    if isinstance(model, Graft):
        raise HeadloomError("this model is already grafted: load the original and graft it anew")
    if not isinstance(model, PreTrainedModel):
        hint = " (graft first, then wrap it with PEFT)" if "peft" in type(model).__module__ else ""
        raise HeadloomError(f"graft takes a transformers model, not a {type(model).__name__}{hint}")
    family = family_named(model.config.model_type)
    grafted_class(model)
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise HeadloomError("a quantized model cannot be grafted: load it in float32, bfloat16 or float16")
    if any(p.is_meta for p in model.parameters()):
        raise HeadloomError("a model with weights on the meta device cannot be grafted: load its weights first")
    return family


def _check_attention(family: Family, attention: nn.Module, index: int) -> None:
    if type(attention) is not family.attention_class():
        raise HeadloomError(
            f"layer {index}'s attention is a {type(attention).__name__}, not {family.name}'s own "
            f"{family.attention_class().__name__}: something else has replaced it already"
        )
    if hasattr(attention, "_hf_hook"):
        raise HeadloomError("a model spread over devices by accelerate cannot be grafted: load it on one device")
    kind = family.layout.plain_kind()
    for name in family.layout.projections:
        projection = attention.get_submodule(name)
        if type(projection) is not kind:
            raise HeadloomError(
                f"layer {index}'s {name} is a {type(projection).__name__}, not a plain {kind.__name__}: "
                "graft before adapters"
            )


def parse_layers(layers: str | int | Iterable[int] | None, count: int) -> list[int]:
    """Layer indices in order: None = all, "0-3,8", an index, or several.

    >>> parse_layers("0-2,5", 8)
    [0, 1, 2, 5]
    """
    if layers is None:
        return list(range(count))
    if isinstance(layers, str):
        found = read_layers(layers)
    elif isinstance(layers, Iterable):
        found = list(layers)
    else:
        found = [layers]
    for index in found:
        if type(index) is not int or not 0 <= index < count:
            raise HeadloomError(f"layer {index!r} does not exist: the model has {count} layers, 0 to {count - 1}")
    if not found:
        raise HeadloomError("no layers were named: give some, or leave `layers` out for all")
    return sorted(set(found))


def _plan(name: str | None, layers: Any, options: dict[str, Any], count: int) -> dict[int, tuple[str, dict[str, Any]]]:
    """Layer index -> (mechanism, options)."""
    if not isinstance(layers, Mapping):
        if name is None:
            raise HeadloomError(f"name a mechanism: {', '.join(mechanisms())}")
        return dict.fromkeys(parse_layers(layers, count), (name, options))
    plan: dict[int, tuple[str, dict[str, Any]]] = {}
    for where, spec in layers.items():
        own, more = as_spec(spec)
        for index in parse_layers(where, count):
            if index in plan:
                raise HeadloomError(f"layer {index} is named twice")
            plan[index] = (own, {**options, **more})
    if not plan:
        raise HeadloomError("no layers were named: give some, or leave `layers` out for all")
    return plan


def _config(family: Family, config: Any, index: int, mechanism: str, given: dict[str, Any]) -> AttentionConfig:
    """The layer's config: the family's sizes, the graft's own defaults of the mechanism, then what was given."""
    if mechanism not in mechanisms():
        make_config(mechanism)  # raises with the near names
    defaults = mechanisms()[mechanism].config_cls.graft_defaults(given)
    return layer_config(mechanism, family.common(config, index), {**defaults, **given})


def _check_exact(change: LayerChange, plain: AttentionConfig) -> None:
    """Refuse what cannot keep the function of `plain`, before anything is touched: an init that is not exact, or
    another value of what is not the mechanism's own (a window, say, which a short probe would not show)."""
    made = change.config
    fields = [field.name for field in dataclasses.fields(AttentionConfig) if field.name not in ("base", "dropout")]
    names = [name for name in fields if getattr(made, name) != getattr(plain, name)]
    if not names and not made.exact:
        defaults = type(made).graft_defaults(made.to_dict())
        names = [name for name, value in defaults.items() if getattr(made, name) != value]
    if names or not made.exact:
        given = ", ".join(f"{name}={getattr(made, name)}" for name in names)
        raise HeadloomError(
            f"{change.mechanism}{' with ' if names else ''}{given} does not start as the attention it replaces: "
            f"{'leave these options to graft, or ' if names else ''}pass allow_change=True"
        )
