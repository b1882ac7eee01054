"""Our own models: a Llama (or Mixtral) from transformers, or the model of a Hugging Face config, whose layers have a
Headloom attention.

They are initialised by (seed, name)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headloom.contract.config import AttentionConfig
from headloom.core.errors import HeadloomError
from headloom.hf.grafting.backbone import complete, config_of, keeping_enough, sized
from headloom.hf.model.config import OWN_PROJECTIONS, OWN_ROTARY, config_class, grafted_config
from headloom.hf.model.family import Family, family_named
from headloom.hf.model.layer_plan import LayerPlan
from headloom.hf.model.rope import to_parameters
from headloom.mechanism import built_config, layer_config
from headloom.mechanism.schedules import as_spec, layers_of, whole
from headloom.ops.seeding import seeded_by_name

Spec = tuple[str, dict[str, Any]]


def build_model(
    specs: Spec | str | Sequence[Spec],
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    intermediate_size: int,
    max_positions: int,
    tie_embeddings: bool = True,
    rope_theta: float | None = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    norm_eps: float = 1e-6,
    family: str = "llama",
    experts: int | None = None,
    experts_per_token: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Any:
    """A `HeadloomLlamaForCausalLM`, or another family's, in float32, in training mode.

    Args:
        specs: (mechanism or schedule, options) for all layers, or a list of one per layer (`hl.schedule` repeats a
            pattern). Options win over the sizes here; a schedule takes its windows from `max_positions`.
        num_kv_heads: G, or None for each mechanism's own default.
        family: the backbone around the attention: "llama", or "mixtral", whose every layer routes a token to
            `experts_per_token` (None: 2) of its `experts` (None: 8) feed-forwards, each of width intermediate_size.
        seed: every tensor is drawn from a generator seeded by (seed, its name): models of one seed share every tensor
            of equal name and shape, whatever their mechanisms and feed-forward widths.
        device: "meta" builds without memory, for counting.
    Raises:
        HeadloomError: unknown names, sizes that do not fit, or a number of specs that is not the number of layers.
    """
    given = {"vocab_size": vocab_size, "num_layers": num_layers, "intermediate_size": intermediate_size}
    for name, value in {**given, "max_positions": max_positions}.items():
        whole(name, value)
    tokens = _tokens(vocab_size, pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    if rope_scaling is not None and not isinstance(rope_scaling, Mapping):
        raise HeadloomError(f"rope_scaling must be a mapping like {{'rope_type': ...}} or None, not {rope_scaling!r}")
    if type(tie_embeddings) is not bool:
        raise HeadloomError(f"tie_embeddings must be true or false, not {tie_embeddings!r}")
    place = _device(device)
    backbone = family_named(family)
    shared = {
        "hidden_size": hidden_size,
        "num_heads": num_heads,
        **({} if num_kv_heads is None else {"num_kv_heads": num_kv_heads}),
        **({} if head_dim is None else {"head_dim": head_dim}),
        "norm_eps": norm_eps,
        "rope_theta": rope_theta,
        "rope_scaling": _scaling(rope_scaling, max_positions),
    }
    named = _specs(specs, num_layers, max_positions)
    made = [layer_config(name, shared, options) for name, options in named]
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(c.num_kv_heads or 1 for c in made),
        "head_dim": made[0].head_dim,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": norm_eps,
        "tie_word_embeddings": tie_embeddings,
        "rope_parameters": to_parameters(rope_theta, rope_scaling),
        "attention_dropout": made[0].dropout,
        **tokens,
    }
    routed = _experts(experts=experts, experts_per_token=experts_per_token)
    config = config_class(backbone.name)(**backbone.own_config(sizes, [c.window for c in made], routed))
    layers = _said(backbone, config, named, made)
    return _initialised(backbone, grafted_config(config, layers, rotary=OWN_ROTARY), seed, place)


def build_around(
    specs: Spec | str | Sequence[Spec],
    backbone: Mapping[str, Any],
    *,
    vocab_size: int,
    tokens: int,
    num_kv_heads: int | None = None,
    seed: int = 0,
    device: str | torch.device | None = None,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
    **sizes: int,
) -> Any:
    """The causal language model of a Hugging Face config with other attentions: a `HeadloomGPT2LMHeadModel`, say, in
    float32, in training mode. All but the attention is the family's, its initialisation included.

    Args:
        specs: as `build_model`; what they leave open is what the config says about its own attention.
        backbone: the config's fields, as `read_backbone` gives them.
        tokens: the context, from which a schedule takes its windows and which learned positions must hold.
        num_kv_heads: G for all layers that leave it open; None: the config's, where the mechanism can have it.
        sizes: over the config's: num_layers, hidden_size, num_heads, head_dim, intermediate_size.
    Raises:
        HeadloomError: as `build_model`, and sizes or a context that the family cannot have.
    """
    for name, value in {"vocab_size": vocab_size, "tokens": tokens, **sizes}.items():
        whole(name, value)
    special = _tokens(vocab_size, pad_token_id=pad_token_id, bos_token_id=bos_token_id, eos_token_id=eos_token_id)
    backbone = complete(backbone)
    place, family = _device(device), family_named(backbone["model_type"])
    config = config_of(sized(backbone, **sizes), tokens=tokens, vocab_size=vocab_size, **special)
    named = _specs(specs, config.num_hidden_layers, tokens)
    more = {} if num_kv_heads is None else {"num_kv_heads": num_kv_heads}
    facts = [{**family.common(config, index), **more} for index in range(len(named))]
    made = [built_config(name, fact, options) for fact, (name, options) in zip(facts, named, strict=True)]
    config = keeping_enough(family, config, [c.window for c in made])
    layers = _said(family, config, named, made)
    return _initialised(family, grafted_config(config, layers, projections=OWN_PROJECTIONS), seed, place)


def _said(
    family: Family, config: Any, named: Sequence[Spec], made: Sequence[AttentionConfig]
) -> list[dict[str, Any] | None]:
    """What a grafted config says of each layer."""
    return [
        LayerPlan(i, name, c, family.common(config, i)).spec()
        for i, ((name, _), c) in enumerate(zip(named, made, strict=True))
    ]


def _initialised(family: Family, config: Any, seed: int, place: torch.device) -> Any:
    """The model of a grafted config, every tensor drawn from a generator seeded by (seed, its name)."""
    from transformers.initialization import no_init_weights

    from headloom.hf.model.classes import model_class, register_heads

    register_heads(family)
    cls = model_class(family.name, family.head_classes()["AutoModelForCausalLM"])
    where = place if place.type == "meta" else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), where, no_init_weights():
        model = cls(config)
    if place.type != "meta":
        with seeded_by_name(model, seed):
            model.initialize_weights()
    elif model._can_set_experts_implementation():  # the others read how many tokens an expert got
        model.set_experts_implementation("batched_mm")
    model.loss_type = "ForCausalLM"  # transformers finds it by the class's name, but not by GPT-2's
    model.tie_weights()
    return model.to(place)


def _device(given: Any) -> torch.device:
    try:
        return torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError):
        raise HeadloomError(f"device must be one that PyTorch has here (cpu, cuda, meta), not {given!r}") from None


def _specs(specs: Any, num_layers: int, tokens: int) -> list[Spec]:
    """A mechanism's name and options for every layer."""
    if isinstance(specs, str):
        specs = (specs, {})
    if isinstance(specs, tuple) and len(specs) == 2 and isinstance(specs[0], str):
        specs = layers_of(*as_spec(specs), num_layers=num_layers, tokens=tokens)
    if not isinstance(specs, Sequence):
        raise HeadloomError(f"give a mechanism's name, (name, options), or a list of one per layer, not {specs!r}")
    specs = [as_spec(spec) for spec in specs]
    if len(specs) != num_layers:
        raise HeadloomError(
            f"{len(specs)} specs came for {num_layers} layers: give one for all, one per layer, or repeat a pattern "
            "with hl.schedule(pattern, num_layers=...)"
        )
    return specs


def _tokens(vocab_size: int, **special: int | None) -> dict[str, int | None]:
    """The special tokens, each an id of the vocabulary or None."""
    for name, token in special.items():
        if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
            raise HeadloomError(f"{name} must be an id below vocab_size {vocab_size} or None, not {token!r}")
    return special


def _scaling(rope_scaling: dict[str, Any] | None, max_positions: int) -> dict[str, Any] | None:
    return None if rope_scaling is None else {**rope_scaling, "max_position_embeddings": max_positions}


def _experts(**given: int | None) -> dict[str, int]:
    """The numbers of experts that were given. Raises HeadloomError for one that is no count."""
    for name, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise HeadloomError(f"{name} must be an int of at least 1, not {value!r}")
    return {name: value for name, value in given.items() if value is not None}
