"""`fold`: an ordinary model of the family from a graft whose mixes can be multiplied into its projections."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Plain
from headloom.core.errors import HeadloomError
from headloom.hf.grafting.probe import TOLERANCES, compared, largest_difference, outputs_of, reference_of, tolerance
from headloom.hf.grafting.sharing import check_calls, check_hooks, sharing_copy
from headloom.hf.model.attention import GraftedAttention
from headloom.hf.model.config import MODEL_TYPE, OWN_ROTARY
from headloom.hf.model.family import Family, attentions
from headloom.hf.model.mixin import Graft
from headloom.hf.model.reports import FoldReport

# Fields of a config that a folded layer must share with its family's own; its sizes come from the weights.
_SHARED = (
    *("causal", "window", "softcap", "qkv_bias", "out_bias", "qk_norm", "norm_eps"),
    *("rope_theta", "rope_scaling", "score", "scale"),
)


def fold(model: Any) -> Any:
    """A new model of the family's own class with the mixes of a graft multiplied into its projections.

    A saved folder of it loads without headloom. Where a mix makes key/value heads of its own, every layer gets as many
    (num_key_value_heads is one number). `model` stays as it is and usable. What lies outside the folded layers'
    attention are the same tensors in both, so training one trains the other there; `copy.deepcopy` parts them.

    Returns:
        The new model. Its `fold_report` says which layers were folded and what was measured.
    Raises:
        HeadloomError: not a graft; a part that plain weights cannot express, with the reason and what would fold; a
            layer whose window or the like is not its family's; hooks on an attention, or an attribute that cannot be
            copied.
    """
    family = _check(model)
    layers, usual = family.layers(model), AttentionConfig(**family.common(model.config, 0))
    grafted = [i for i, a in enumerate(attentions(family, model)) if isinstance(a, GraftedAttention)]
    with torch.no_grad():
        found = {index: _plain(family, layers[index]) for index in grafted}
        folded = _folded(family, model, found, usual)
    what, allowed = compared(family, folded), max(tolerance(family, model), tolerance(family, folded))
    if model.config.headloom.get("rotary") == OWN_ROTARY:  # our models keep wider tables of cos and sin than a family
        allowed = max(allowed, TOLERANCES[torch.float32])
    probe, reference, routes = reference_of(family, model, what)
    got, real = outputs_of(family, folded, probe, what, routes), probe["attention_mask"].bool()
    rows = 2 if bool(got[real].isfinite().all()) else 1  # transformers' eager attention: NaN for padding in float64
    difference, relative = largest_difference(reference[:rows], got[:rows], real[:rows])
    if not relative <= allowed:
        raise HeadloomError(
            f"folding changes the {what} by {difference:.1e}, {relative:.1e} of their range, more than rounding "
            f"in {model.dtype} explains: fold it in float32 and cast afterwards"
        )
    before, after = (sum(p.numel() for p in m.parameters()) for m in (model, folded))
    kv_heads = AttentionConfig(**family.common(folded.config, 0)).num_kv_heads or 1
    folded.fold_report = FoldReport(
        tuple(grafted), usual.num_kv_heads or 1, kv_heads, before, after, what, difference, relative
    )
    return folded


# ---- what can be folded ---------------------------------------------------------------------------------------------
def _check(model: Any) -> Family:
    if not issubclass(type(model), Graft):
        raise HeadloomError(f"only a grafted model can be folded, not a {type(model).__name__}")
    if any(p.is_meta for p in model.parameters()):
        raise HeadloomError("a model with weights on the meta device cannot be folded: load its weights first")
    check_calls(model)
    family: Family = model.family
    for index, attention in enumerate(attentions(family, model)):
        if not isinstance(attention, GraftedAttention):
            continue
        check_hooks(attention, f"layer {index}'s attention")
        made: Any = attention.config
        if not made.folding.complete:
            raise HeadloomError(f"layer {index} cannot be folded into a plain {family.name} layer: {made.folding}")
        common = AttentionConfig(**family.common(model.config, index))
        differing = [name for name in _SHARED if getattr(made, name) != getattr(common, name)]
        if _turned_share(made) != _turned_share(common):
            differing.append("rotary_dim")
        if made.value_dim != made.query_dim:
            differing.append("value_dim")
        if differing:
            given = ", ".join(f"{name}={getattr(made, name)}" for name in differing)
            raise HeadloomError(f"layer {index} has {given}, which a plain {family.name} layer cannot have")
    return family


def _turned_share(config: AttentionConfig) -> float:
    return (config.rotary_dim or 0) / config.query_dim


# ---- plain layers ----------------------------------------------------------------------------------------------------
def _plain(family: Family, layer: nn.Module, kv_heads: int | None = None) -> Plain:
    """A layer's weights as plain attention: folded, or, where it was not grafted and has `kv_heads`, as they are."""
    attention: Any = family.attention_of(layer)
    if all(hasattr(attention, name) for name in family.layout.inputs):
        found = family.layout.weights(attention, kv_heads)
    else:  # projections of its own
        found = {
            name: (p.weight, p.bias) for name in "qkv" if (p := getattr(attention, f"{name}_proj", None)) is not None
        }
    out = getattr(attention, "o_proj", None) or family.output_of(layer)
    found.setdefault("o", (out.weight, out.bias))
    if isinstance(attention, GraftedAttention):
        return attention.fold_into(found)  # type: ignore[attr-defined]
    assert kv_heads is not None
    return Plain(found["q"], found["k"], found["v"], found["o"], kv_heads)


def _folded(family: Family, model: Any, found: dict[int, Plain], usual: AttentionConfig) -> Any:
    """A copy of `model` on its tensors, of the family's own classes, whose attentions hold the plain weights."""
    config = _config(family, model, found, usual)
    plain = AttentionConfig(**family.common(config, 0))
    same_heads = (plain.num_kv_heads, plain.head_dim) == (usual.num_kv_heads, usual.head_dim)
    empty = _empty(family, model, config)
    base = model.base_model
    folded = sharing_copy(model, classes={base: type(empty.base_model), model: type(empty)}, config=config)
    vars(folded).pop("graft_report", None)
    folded._keep_in_fp32_modules_strict = empty._keep_in_fp32_modules_strict
    if plain.head_dim != usual.head_dim:  # tables of positions are as wide as heads
        for path, module in [(path, m) for path, m in folded.named_modules() if "rotary" in path]:
            folded.set_submodule(path, type(module)(config).to(model.device))
    for index, (layer, target) in enumerate(zip(family.layers(folded), family.layers(empty), strict=True)):
        if index not in found and same_heads:
            continue  # the family's own attention already
        old: Any = family.attention_of(layer)
        weights = found.get(index) or _plain(family, layer, usual.num_kv_heads)
        new: Any = family.attention_of(target).to_empty(device=model.device).train(old.training)
        for name in () if family.layout.norm is None else ("q_norm", "k_norm"):
            setattr(new, name, getattr(old, name))
        family.replace(layer, new)
        _fill(family, layer, weights, plain.num_kv_heads or 1)
    return folded


def _config(family: Family, model: Any, found: dict[int, Plain], usual: AttentionConfig) -> Any:
    """The family's own config, with the numbers of heads and widths that the plain weights have."""
    values = model.config.to_dict()
    del values[MODEL_TYPE]
    config = family.config_class().from_dict(values)
    kv_heads = {plain.num_kv_heads for plain in found.values()}
    widths = {len(plain.q[0]) // usual.num_heads for plain in found.values()}
    if len(found) < config.num_hidden_layers:
        kv_heads.add(usual.num_kv_heads or 1)
        widths.add(usual.head_dim or 0)
    if len(widths) > 1:
        raise HeadloomError(
            f"heads of widths {sorted(widths)} in one model: those of a plain {family.name} are equally wide"
        )
    if kv_heads != {usual.num_kv_heads}:
        config.num_key_value_heads = math.lcm(*kv_heads)
    if widths != {usual.head_dim}:
        config.head_dim = widths.pop()
    config._name_or_path = model.config._name_or_path
    config._experts_implementation_internal = model.config._experts_implementation
    return config


def _empty(family: Family, model: Any, config: Any) -> Any:
    """A model of the family without memory for its weights: its attentions are what is wanted of it."""
    from transformers.modeling_utils import local_torch_dtype

    head = next(head for head in family.head_classes().values() if issubclass(type(model), head))
    with local_torch_dtype(model.dtype), torch.device("meta"):
        return head(config).eval()


def _fill(family: Family, layer: nn.Module, plain: Plain, kv_heads: int) -> None:
    """Write folded weights into an ordinary layer of `kv_heads` key/value heads whose own have no values yet."""
    repeats, attention = kv_heads // plain.num_kv_heads, family.attention_of(layer)

    def repeated(x: Tensor | None) -> Tensor | None:
        if x is None or repeats == 1:
            return x
        return x.unflatten(0, (plain.num_kv_heads, -1)).repeat_interleave(repeats, 0).flatten(0, 1)

    family.layout.write(attention, "q", *plain.q, heads=kv_heads)
    for name, (weight, bias) in {"k": plain.k, "v": plain.v}.items():
        family.layout.write(attention, name, cast(Tensor, repeated(weight)), repeated(bias), heads=kv_heads)
    if family.layout.out is not None:
        family.layout.write(attention, "o", *plain.o, heads=kv_heads)
    else:
        output = family.output_of(layer)  # a copy on the tensors of the graft, which stay as they are
        output.weight = nn.Parameter(plain.o[0].to(output.weight).clone(), output.weight.requires_grad)
