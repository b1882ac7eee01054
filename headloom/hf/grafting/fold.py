"""`fold`: a graft that plain weights can say goes back into an ordinary model of its family, in place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn

from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Plain
from headloom.core.errors import HeadloomError
from headloom.hf.grafting.swap import TOLERANCES, compare, compared, outputs_of, reference_of, tolerance
from headloom.hf.model.attention import GraftedAttention
from headloom.hf.model.config import MODEL_TYPE, OWN_ROTARY
from headloom.hf.model.family import Family, attentions
from headloom.hf.model.mixin import Graft

# Fields of a config that a folded layer must share with its family's own; its sizes come from the weights.
_SHARED = (
    *("causal", "window", "softcap", "qkv_bias", "out_bias", "qk_norm", "norm_eps"),
    *("rope_theta", "rope_scaling", "score", "scale"),
)


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What a fold did.

    layers: those that were grafted. kv_heads_before, kv_heads: of every layer of the model; more of them widen the
    cache. difference, relative: of what was `compared` (logits, last hidden states) on a probe batch.
    """

    layers: tuple[int, ...]
    kv_heads_before: int
    kv_heads: int
    parameters_before: int
    parameters: int
    compared: str
    difference: float
    relative: float

    def __str__(self) -> str:
        cache = "key/value heads as before"
        if self.kv_heads != self.kv_heads_before:
            ratio = self.kv_heads / self.kv_heads_before
            cache = f"{self.kv_heads} key/value heads instead of {self.kv_heads_before}: the cache is {ratio:g} times"
        return (
            f"{len(self.layers)} layers folded into plain weights; {cache}; {self.parameters:,} parameters, "
            f"{self.parameters_before:,} before; {self.compared} differ by {self.difference:.1e} "
            f"({self.relative:.1e} of their range)"
        )


def fold(model: Any) -> FoldReport:
    """Multiply the mixes of a grafted model into its projections, in place.

    Afterwards class and config are the family's own and a saved folder loads without headloom. Where a mix makes
    key/value heads of its own, every layer of the model gets as many (num_key_value_heads is one number).

    Raises:
        HeadloomError: not a graft; a part that plain weights cannot say, with the reason and with what would fold; a
            layer whose window or the like is not its family's. The model is then exactly as it was.
    """
    family = _check(model)
    layers, usual = family.layers(model), AttentionConfig(**family.common(model.config, 0))
    grafted = [i for i, a in enumerate(attentions(family, model)) if isinstance(a, GraftedAttention)]
    with torch.no_grad():
        plain = {index: _plain(family, layers[index]) for index in grafted}
        shell = _shell(family, model, plain)
        kv_heads = AttentionConfig(**family.common(shell.config, 0)).num_kv_heads or 1
        for index, (layer, target) in enumerate(zip(layers, family.layers(shell), strict=True)):
            found = plain.get(index) or _plain(family, layer, usual.num_kv_heads)
            _fill(family, target, found, kv_heads)
            for name in () if family.layout.norm is None else ("q_norm", "k_norm"):
                setattr(family.attention_of(target), name, getattr(family.attention_of(layer), name))
    parameters, what = sum(p.numel() for p in model.parameters()), compared(family, shell)
    allowed = tolerance(family, model)
    if model.config.headloom.get("rotary") == OWN_ROTARY:  # our models keep wider tables of cos and sin than a family
        allowed = max(allowed, TOLERANCES[torch.float32])
    probe, reference, routes = reference_of(family, model, what)
    with _exchanged(
        family, model, shell, turned=usual.head_dim != AttentionConfig(**family.common(shell.config, 0)).head_dim
    ):
        allowed = max(allowed, tolerance(family, model))
        got, real = outputs_of(family, model, probe, what, routes), probe["attention_mask"].bool()
        rows = 2 if bool(got[real].isfinite().all()) else 1  # transformers' eager attention: NaN for padding in float64
        difference, relative = compare(reference[:rows], got[:rows], real[:rows])
        if not relative <= allowed:
            raise HeadloomError(
                f"folding changes the {what} by {difference:.1e}, {relative:.1e} of their range, more than rounding "
                f"in {model.dtype} explains: fold it in float32 and cast afterwards"
            )
    after = sum(p.numel() for p in model.parameters())
    return FoldReport(tuple(grafted), usual.num_kv_heads or 1, kv_heads, parameters, after, what, difference, relative)


# ---- what can be folded ---------------------------------------------------------------------------------------------
def _check(model: Any) -> Family:
    if not issubclass(type(model), Graft):
        raise HeadloomError(f"only a grafted model can be folded, not a {type(model).__name__}")
    if any(p.is_meta for p in model.parameters()):
        raise HeadloomError("a model with weights on the meta device cannot be folded: load its weights first")
    family: Family = model.family
    for index, attention in enumerate(attentions(family, model)):
        if not isinstance(attention, GraftedAttention):
            continue
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
            raise HeadloomError(f"layer {index} has {given}, which a plain {family.name} layer cannot say")
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


def _shell(family: Family, model: Any, plain: dict[int, Plain]) -> Any:
    """An ordinary model of the family with the sizes of the folded layers and, as yet, nothing in it."""
    from transformers.initialization import no_init_weights
    from transformers.modeling_utils import local_torch_dtype

    values = model.config.to_dict()
    del values[MODEL_TYPE]
    config = family.config_class().from_dict(values)
    usual = AttentionConfig(**family.common(config, 0))
    kv_heads = {found.num_kv_heads for found in plain.values()}
    widths = {len(found.q[0]) // usual.num_heads for found in plain.values()}
    if len(plain) < config.num_hidden_layers:
        kv_heads.add(usual.num_kv_heads or 1)
        widths.add(usual.head_dim or 0)
    if len(widths) > 1:
        raise HeadloomError(f"heads of widths {sorted(widths)} in one model, which a plain {family.name} cannot say")
    if kv_heads != {usual.num_kv_heads}:
        config.num_key_value_heads = math.lcm(*kv_heads)
    if widths != {usual.head_dim}:
        config.head_dim = widths.pop()
    config._name_or_path = model.config._name_or_path
    config._experts_implementation_internal = model.config._experts_implementation
    head = next(head for head in family.head_classes().values() if issubclass(type(model), head))
    with torch.random.fork_rng(devices=[]), local_torch_dtype(model.dtype), no_init_weights():
        return head(config).eval()


def _fill(family: Family, layer: nn.Module, plain: Plain, kv_heads: int) -> None:
    """Write folded weights into an ordinary layer of `kv_heads` key/value heads."""
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
        family.output_of(layer).weight.copy_(plain.o[0])


@contextlib.contextmanager
def _exchanged(family: Family, model: Any, shell: Any, *, turned: bool) -> Iterator[None]:
    """`model` takes over the shell's class, config, attentions and, where heads have another width (`turned`), its
    tables of positions. An error inside undoes it."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    device, old = model.device, attentions(family, model)
    base, base_class = model.base_model, type(model.base_model)
    before = type(model), model.config, model._keep_in_fp32_modules_strict
    layers = list(zip(family.layers(model), family.layers(shell), strict=True))
    swaps: list[tuple[Any, str, Any]] = []
    if family.layout.out is None:
        swaps += [(family.output_of(ours), "weight", family.output_of(new).weight) for ours, new in layers]
    if turned:
        swaps += [
            (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
            for path, module in shell.named_modules()
            if "rotary" in path
        ]
    held = [getattr(parent, name) for parent, name, _ in swaps]
    holders = [module for module in model.modules() if vars(module).get("config") is model.config]
    shell.to(device)
    try:
        for ours, new in layers:
            family.replace(ours, family.attention_of(new).train(ours.training))
        for parent, name, value in swaps:
            setattr(parent, name, value)
        model.__class__, base.__class__ = type(shell), type(shell.base_model)
        for module in holders:
            module.config = shell.config
        model._keep_in_fp32_modules_strict = shell._keep_in_fp32_modules_strict
        _CAN_RECORD_REGISTRY[model] = model._can_record_outputs  # keyed on the class, filled in __init__
        yield
    except BaseException:
        model.__class__, config, model._keep_in_fp32_modules_strict = before
        base.__class__ = type(model) if base is model else base_class
        for (ours, _), attention in zip(layers, old, strict=True):
            family.replace(ours, attention)
        for (parent, name, _), value in zip(swaps, held, strict=True):
            setattr(parent, name, value)
        for module in holders:
            module.config = config
        _CAN_RECORD_REGISTRY[model] = model._can_record_outputs
        raise
