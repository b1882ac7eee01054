"""Under `graft`: the new layers, the swap, taking it back, and measuring what it did."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headloom.core.errors import HeadloomError
from headloom.hf.model.attention import in_width_of, make_attention
from headloom.hf.model.classes import grafted_class
from headloom.hf.model.family import Family, attentions
from headloom.hf.model.masks import IMPLEMENTATION, register
from headloom.ops.seeding import seeded_by_name

TOLERANCES = {torch.float64: 1e-9, torch.float32: 2e-4, torch.bfloat16: 5e-2, torch.float16: 5e-3}


def new_attention(family: Family, config: Any, index: int, spec: Any, old: nn.Module) -> Any:
    """The new attention on the old one's device and in its type, holding its modules."""
    layout = family.layout
    weight: Any = old.get_submodule(layout.inputs[0]).weight
    with in_width_of(weight.dtype), weight.device:
        new = make_attention(family, config, index, spec, old)
        if new.base is not layout:
            for name in layout.projections:
                _take(new, name, old.get_submodule(name), index)
        with seeded_by_name(new, index):  # the same graft twice is the same graft
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


# ---- swapping, and taking it back ---------------------------------------------------------------------------------
def swap(family: Family, model: Any, config: Any, fresh: dict[int, nn.Module]) -> None:
    register()
    layers = family.layers(model)
    for index, attention in fresh.items():
        family.replace(layers[index], attention)
    model.__class__ = grafted_class(model)
    _give_config(model, model.config, config)
    config._attn_implementation_internal = IMPLEMENTATION
    model.take_base()
    model.keep_mixes_wide()
    model.take_records()


def _give_config(model: nn.Module, old: Any, new: Any) -> None:
    """Every module that held the model's config holds the new one; a config shared with other models stays theirs."""
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new


@contextlib.contextmanager
def revert_on_error(family: Family, model: Any) -> Iterator[None]:
    cls, config, old = type(model), model.config, attentions(family, model)
    base, base_cls = model.base_model, type(model.base_model)
    wide = model._keep_in_fp32_modules_strict
    try:
        yield
    except BaseException:
        model.__class__, base.__class__ = cls, base_cls
        if model.config is not config:
            _give_config(model, model.config, config)
        model._keep_in_fp32_modules_strict = wide
        for layer, attention in zip(family.layers(model), old, strict=True):
            family.replace(layer, attention)
        raise


# ---- measuring ----------------------------------------------------------------------------------------------------
def probe_batch(model: Any) -> dict[str, Tensor]:
    """Two rows of random tokens, the second one left-padded."""
    config, device = model.config, model.get_input_embeddings().weight.device
    T = min(24, getattr(config, "max_position_embeddings", 48) // 2)  # some families count positions from an offset
    ids = torch.randint(config.vocab_size, (2, T), generator=torch.Generator().manual_seed(0))
    mask = torch.ones(2, T, dtype=torch.long)
    mask[1, : T // 3] = 0
    return {"input_ids": ids.to(device), "attention_mask": mask.to(device)}


def compared(family: Family, model: Any) -> str:
    """What a graft compares: "logits", or "last hidden states" for heads that give none for each token."""
    heads = family.head_classes()
    wordy = [heads.get(name) for name in ("AutoModelForCausalLM", "AutoModelForMaskedLM")]
    return "logits" if type(model) in wordy else "last hidden states"


Routes = list[Any]
"""What the routers of a mixture of experts gave on a probe batch, in the order of their calls."""


@contextlib.contextmanager
def _routed(family: Family, model: Any, routes: Routes) -> Iterator[None]:
    """Inside, routers choose the experts that stand in `routes`; what they choose where it is empty is kept there.

    A difference of rounding may send a token to another expert. It then says nothing about the attention.
    """
    again = iter(tuple(routes))

    def take(router: nn.Module, call: Any, chosen: Any) -> Any:
        found = next(again, None)
        if found is None:
            routes.append(chosen)
        return found

    routers = [router for layer in family.layers(model) for router in family.routers(layer)]
    handles = [router.register_forward_hook(take) for router in routers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def outputs_of(family: Family, model: Any, probe: dict[str, Tensor], what: str, routes: Routes) -> Tensor:
    """The model's outputs on a probe batch in eval mode, its tokens sent to the experts of `routes` (empty: filled)."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with _routed(family, model, routes):
            if what == "logits":
                return model(**probe, use_cache=False).logits
            return model.base_model(**probe, use_cache=False).last_hidden_state
    finally:
        for module in training:
            module.training = True


def reference_of(family: Family, model: Any, what: str) -> tuple[dict[str, Tensor], Tensor, Routes]:
    """A probe batch, what the model makes of it, and the experts it chose.

    transformers' eager attention gives NaN for padding in float64: then the row without padding alone is compared.
    """
    probe = probe_batch(model)
    for rows in (2, 1):
        probe = {name: values[:rows] for name, values in probe.items()}
        routes: Routes = []
        reference = outputs_of(family, model, probe, what, routes)
        if bool(reference[probe["attention_mask"].bool()].isfinite().all()):
            return probe, reference, routes
    raise HeadloomError(f"this model's own {what} on a probe batch are not finite: nothing can be compared with them")


def tolerance(family: Family, model: Any) -> float:
    """The largest difference, relative to the range, that counts as rounding.

    A family may compute in float32 inside a float64 model: eager attention its softmax, some their rotation.
    """
    dtype = model.dtype
    if dtype == torch.float64 and (model.config._attn_implementation == "eager" or family.rotary.single):
        dtype = torch.float32
    return TOLERANCES.get(dtype, TOLERANCES[torch.float32])


def compare(reference: Tensor, got: Tensor, real: Tensor) -> tuple[float, float]:
    """(largest difference, that over the reference's range) on real tokens."""
    wanted, got = reference[real].double(), got[real].double()
    difference = float((wanted - got).abs().max())
    spread = float(wanted.max() - wanted.min())
    if not difference < float("inf"):
        return float("inf"), float("inf")
    return difference, difference / spread if spread > 0 else difference
