"""`graft`: a model with another attention, the same weights and (unless allowed otherwise) the same function."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from headloom.contract.config import AttentionConfig
from headloom.core.errors import HeadloomError
from headloom.hf.grafting.fresh import new_attention
from headloom.hf.grafting.probe import compared, largest_difference, outputs_of, reference_of, tolerance
from headloom.hf.grafting.sharing import check_calls, check_hooks, sharing_copy
from headloom.hf.model.classes import grafted_class
from headloom.hf.model.config import grafted_config
from headloom.hf.model.family import Family, attentions, family_named
from headloom.hf.model.layer_plan import LayerPlan, plan_layer
from headloom.hf.model.masks import IMPLEMENTATION, register_masks
from headloom.hf.model.mixin import Graft
from headloom.hf.model.reports import GraftReport
from headloom.hf.places import read_layers
from headloom.mechanism import mechanisms
from headloom.mechanism.schedules import as_spec


def graft(
    model: Any,
    name: str | None = None,
    *,
    layers: str | int | Iterable[int] | Mapping[Any, Any] | None = None,
    allow_change: bool = False,
    **options: Any,
) -> Any:
    """A new model with another attention in the layers of `model`, which stays as it is and usable.

    The two share every tensor that the model has: side by side they take the memory of one and of what the mechanism
    adds. So whatever is done to such a tensor is done to both: training, freezing or loading weights, `.to(...)`, or
    merging an adapter into them. For two models that train apart, graft a `copy.deepcopy(model)`, or copy the graft.
    Modules, hooks, flags, config and generation config are copied. Rotary tables and other buffers are shared until one
    of the models replaces them, so after `.to(device)` call it on the other model too.

    Args:
        model: a transformers model of a known family, with any of its heads.
        name: a mechanism; `options` are its own. Unless said otherwise it starts as the function that was there.
        layers: all (None), "0-3,8", indices, or a mapping of these to a name or (name, options).
        allow_change: accept a graft that changes the model's outputs.
    Returns:
        The new model, a `HeadloomLlamaForCausalLM` or the like. Its `graft_report` says what changed: the layers, the
        parameters added, and the measured difference of both models' outputs on a probe batch.
    Raises:
        HeadloomError: a model that cannot be grafted (already grafted, of an unknown family, on the meta device,
            quantized, spread over devices, or with somebody else's attention or forward), an attribute that cannot be
            copied, layers out of range, sizes that do not fit, or a spec that changes the function without
            `allow_change`.
    """
    family = _check(model)
    plans = _plans(family, model, name, layers, options)
    if not allow_change:
        for plan in plans:
            _check_exact(plan)
    grafted = _grafted(family, model, plans)
    what, allowed = compared(family, model), tolerance(family, model)
    probe, reference, routes = reference_of(family, model, what)
    got = outputs_of(family, grafted, probe, what, routes)
    difference, relative = largest_difference(reference, got, probe["attention_mask"].bool())
    exact = relative <= allowed
    if not exact and not allow_change:
        names = ", ".join(dict.fromkeys(plan.mechanism for plan in plans))
        raise HeadloomError(
            f"{names} as given changes the model: {what} differ by {difference:.1e}, {relative:.1e} of their "
            "range. Leave out what is not the mechanism's own, or pass allow_change=True"
        )
    before = sum(p.numel() for p in model.parameters())
    added = sum(p.numel() for p in grafted.parameters()) - before
    count = model.config.num_hidden_layers
    grafted.graft_report = GraftReport(tuple(plans), count, before, added, difference, relative, exact, what)
    return grafted


def _grafted(family: Family, model: Any, plans: Sequence[LayerPlan]) -> Any:
    """A copy of `model` on its tensors, of our classes and with the planned attentions."""
    specs: list[dict[str, Any] | None] = [None] * model.config.num_hidden_layers
    for plan in plans:
        specs[plan.index] = plan.spec()
    config = grafted_config(model.config, specs)
    config._attn_implementation_internal = IMPLEMENTATION
    register_masks()
    base, cls = model.base_model, grafted_class(model)
    grafted = sharing_copy(model, classes={base: cls.inner_class, model: cls}, config=config)
    layers = family.layers(grafted)
    for plan in plans:
        layer = layers[plan.index]
        family.replace(layer, new_attention(family, plan, family.attention_of(layer)))
    grafted.keep_mixes_wide()
    for made in {grafted, grafted.base_model}:
        made.record_outputs()
    return grafted


# ---- what may be grafted ------------------------------------------------------------------------------------------
def _check(model: Any) -> Family:
    from transformers import PreTrainedModel

    if isinstance(model, Graft):
        raise HeadloomError("this model is already grafted: graft the original, which is as it was, or load it anew")
    if not isinstance(model, PreTrainedModel):
        hint = " (graft first, then wrap it with PEFT)" if "peft" in type(model).__module__ else ""
        raise HeadloomError(f"graft takes a transformers model, not a {type(model).__name__}{hint}")
    family = family_named(model.config.model_type)
    grafted_class(model)
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        raise HeadloomError("a quantized model cannot be grafted: load it in float32, bfloat16 or float16")
    if any(p.is_meta for p in model.parameters()):
        raise HeadloomError("a model with weights on the meta device cannot be grafted: load its weights first")
    check_calls(model)
    return family


def _check_attention(family: Family, attention: nn.Module, index: int) -> None:
    if type(attention) is not family.attention_class():
        raise HeadloomError(
            f"layer {index}'s attention is a {type(attention).__name__}, not {family.name}'s own "
            f"{family.attention_class().__name__}: something else has replaced it already"
        )
    check_hooks(attention, f"layer {index}'s attention")
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


def _plans(family: Family, model: Any, name: str | None, layers: Any, options: dict[str, Any]) -> list[LayerPlan]:
    """The plan of every layer that is named, in order."""
    old = attentions(family, model)
    plans = []
    for index, (mechanism, given) in sorted(_named(name, layers, options, len(old)).items()):
        _check_attention(family, old[index], index)
        info = mechanisms().get(mechanism)
        defaults = info.config_cls.graft_defaults(given) if info else {}
        plans.append(plan_layer(family, model.config, index, mechanism, {**defaults, **given}))
    return plans


def _named(name: str | None, layers: Any, options: dict[str, Any], count: int) -> dict[int, tuple[str, dict[str, Any]]]:
    """Layer index -> (mechanism, options)."""
    if not isinstance(layers, Mapping):
        if name is None:
            raise HeadloomError(f"name a mechanism: {', '.join(mechanisms())}")
        return dict.fromkeys(parse_layers(layers, count), (name, options))
    found: dict[int, tuple[str, dict[str, Any]]] = {}
    for where, spec in layers.items():
        own, more = as_spec(spec)
        for index in parse_layers(where, count):
            if index in found:
                raise HeadloomError(f"layer {index} is named twice")
            found[index] = (own, {**options, **more})
    if not found:
        raise HeadloomError("no layers were named: give some, or leave `layers` out for all")
    return found


def _check_exact(plan: LayerPlan) -> None:
    """Refuse what cannot keep the function, before anything is made: an init that is not exact, or another value of
    what is not the mechanism's own (a window, say, which a short probe would not show). Raises HeadloomError."""
    made, plain = plan.config, AttentionConfig(**plan.usual)
    fields = [field.name for field in dataclasses.fields(AttentionConfig) if field.name not in ("base", "dropout")]
    names = [name for name in fields if getattr(made, name) != getattr(plain, name)]
    if not names and not made.exact:
        defaults = type(made).graft_defaults(made.to_dict())
        names = [name for name, value in defaults.items() if getattr(made, name) != value]
    if names or not made.exact:
        given = ", ".join(f"{name}={getattr(made, name)}" for name in names)
        raise HeadloomError(
            f"{plan.mechanism}{' with ' if names else ''}{given} does not start as the attention it replaces: "
            f"{'leave these options to graft, or ' if names else ''}pass allow_change=True"
        )
