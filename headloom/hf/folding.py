"""`fold`: a graft that plain weights can say goes back into an ordinary model of its family, in place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from headloom.attention.config import AttentionConfig
from headloom.attention.folding import Linear, Plain
from headloom.core.errors import HeadloomError
from headloom.hf.adapter import GraftedAttention
from headloom.hf.config import MODEL_TYPE, OWN_ROTARY
from headloom.hf.family import Family, attentions
from headloom.hf.grafting import TOLERANCES
from headloom.hf.model import Graft
from headloom.hf.swap import compare, logits_of, probe_batch

# Fields of a config that a folded layer must share with its family's own; its sizes come from the weights.
_SHARED = (
    *("causal", "window", "softcap", "qkv_bias", "out_bias", "qk_norm", "norm_eps"),
    *("rope_theta", "rope_scaling", "score", "scale"),
)


@dataclasses.dataclass(frozen=True)
class FoldReport:
    """What a fold did.

    layers: those that were grafted. kv_heads_before, kv_heads: of every layer of the model; more of them widen the
    cache. difference, relative: of the logits on a probe batch, as in `GraftReport`.
    """

    layers: tuple[int, ...]
    kv_heads_before: int
    kv_heads: int
    parameters_before: int
    parameters: int
    difference: float
    relative: float

    def __str__(self) -> str:
        cache = "key/value heads as before"
        if self.kv_heads != self.kv_heads_before:
            ratio = self.kv_heads / self.kv_heads_before
            cache = f"{self.kv_heads} key/value heads instead of {self.kv_heads_before}: the cache is {ratio:g} times"
        return (
            f"{len(self.layers)} layers folded into plain weights; {cache}; {self.parameters:,} parameters, "
            f"{self.parameters_before:,} before; logits differ by {self.difference:.1e} ({self.relative:.1e} of their "
            "range)"
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
    old = attentions(family, model)
    grafted: dict[int, Any] = {
        i: attention for i, attention in enumerate(old) if isinstance(attention, GraftedAttention)
    }
    with torch.no_grad():
        plain = {index: attention.fold_into(_read(attention)) for index, attention in grafted.items()}
        shell = _shell(family, model, plain)
        kv_heads = AttentionConfig(**family.common(shell.config, 0)).num_kv_heads or 1
        for index, (attention, target) in enumerate(zip(old, attentions(family, shell), strict=True)):
            own = AttentionConfig(**family.common(model.config, index))
            found = plain.get(index) or Plain(**_read(attention), num_kv_heads=own.num_kv_heads or 1)
            _fill(target, attention, found, kv_heads)
    before = AttentionConfig(**family.common(model.config, 0)).num_kv_heads or 1
    parameters = sum(p.numel() for p in model.parameters())
    # our own models keep wider tables of cos and sin than the family's float32
    wide = torch.float32 if model.config.headloom.get("rotary") == OWN_ROTARY else model.dtype
    tolerance = max(TOLERANCES.get(kind, 0) for kind in (torch.float64, wide, model.dtype))
    probe = probe_batch(model)
    reference = logits_of(model, probe)
    with _exchanged(family, model, shell):
        difference, relative = compare(reference, logits_of(model, probe), probe["attention_mask"].bool())
        if not relative <= tolerance:
            raise HeadloomError(
                f"folding changes the logits by {difference:.1e}, {relative:.1e} of their range, more than rounding "
                f"in {model.dtype} explains: fold it in float32 and cast afterwards"
            )
    after = sum(p.numel() for p in model.parameters())
    return FoldReport(tuple(grafted), before, kv_heads, parameters, after, difference, relative)


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
def _read(attention: nn.Module) -> dict[str, Linear]:
    """The projections there are, as (out, in) weights and biases."""
    found = {letter: getattr(attention, f"{letter}_proj", None) for letter in "qkvo"}
    return {letter: (linear.weight, linear.bias) for letter, linear in found.items() if linear is not None}


def _write(attention: nn.Module, letter: str, weight: Any, bias: Tensor | None) -> None:
    target = getattr(attention, f"{letter}_proj")
    target.weight.copy_(weight)
    if bias is not None:
        target.bias.copy_(bias)


def _shell(family: Family, model: Any, plain: dict[int, Plain]) -> Any:
    """An ordinary model of the family with the sizes of the folded layers and, as yet, nothing in it."""
    from transformers.initialization import no_init_weights

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
    with torch.random.fork_rng(devices=[]), no_init_weights():
        return head(config).to(model.dtype).eval()


def _fill(target: nn.Module, source: nn.Module, plain: Plain, kv_heads: int) -> None:
    """The folded weights, and norms as they are, into a layer of `kv_heads` key/value heads."""
    repeats = kv_heads // plain.num_kv_heads

    def repeated(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.unflatten(0, (plain.num_kv_heads, -1)).repeat_interleave(repeats, 0).flatten(0, 1)

    for letter, (weight, bias) in {"q": plain.q, "o": plain.o}.items():
        _write(target, letter, weight, bias)
    for letter, (weight, bias) in {"k": plain.k, "v": plain.v}.items():
        _write(target, letter, repeated(weight), repeated(bias))
    for name in ("q_norm", "k_norm"):
        if hasattr(target, name):
            setattr(target, name, getattr(source, name))


@contextlib.contextmanager
def _exchanged(family: Family, model: Any, shell: Any) -> Iterator[None]:
    """`model` takes over the shell's class, config, attentions and tables of positions; an error inside undoes it."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    device, before = model.device, (type(model), model.config, model._keep_in_fp32_modules_strict)
    swaps = [
        (layer, family.attention_name, new.to(device).train(layer.training))
        for layer, new in zip(family.layers(model), attentions(family, shell), strict=True)
    ]
    swaps += [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module.to(device))
        for path, module in shell.named_modules()
        if "rotary" in path and not any(True for _ in module.parameters()) and any(True for _ in module.buffers())
    ]
    old = [getattr(parent, name) for parent, name, _ in swaps]
    holders = [module for module in model.modules() if vars(module).get("config") is model.config]
    try:
        for parent, name, module in swaps:
            setattr(parent, name, module)
        model.__class__ = type(shell)
        for module in holders:
            module.config = shell.config
        model._keep_in_fp32_modules_strict = shell._keep_in_fp32_modules_strict
        _CAN_RECORD_REGISTRY[model] = model._can_record_outputs  # keyed on the class, filled in __init__
        yield
    except BaseException:
        model.__class__, config, model._keep_in_fp32_modules_strict = before
        for module in holders:
            module.config = config
        for (parent, name, _), module in zip(swaps, old, strict=True):
            setattr(parent, name, module)
        _CAN_RECORD_REGISTRY[model] = model._can_record_outputs
        raise
