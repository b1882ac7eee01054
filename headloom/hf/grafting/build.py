"""Our own models: a Llama (or Mixtral) from transformers whose every layer has a Headloom attention.

They are initialised by (seed, name)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from headloom.contract.config import AttentionConfig
from headloom.core.errors import HeadloomError
from headloom.hf.model.attention import spec_of
from headloom.hf.model.config import OWN_ROTARY, config_class, grafted_config
from headloom.hf.model.family import family_named
from headloom.hf.model.rope import to_parameters
from headloom.mechanism import layer_config
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
    from transformers.initialization import no_init_weights

    from headloom.hf.model.classes import model_class, register_heads

    sized = {"vocab_size": vocab_size, "num_layers": num_layers, "intermediate_size": intermediate_size}
    for name, value in {**sized, "max_positions": max_positions}.items():
        whole(name, value)
    for name, token in (("pad", pad_token_id), ("bos", bos_token_id), ("eos", eos_token_id)):
        if token is not None and (type(token) is not int or not 0 <= token < vocab_size):
            raise HeadloomError(f"{name}_token_id must be an id below vocab_size {vocab_size} or None, not {token!r}")
    if rope_scaling is not None and not isinstance(rope_scaling, Mapping):
        raise HeadloomError(f"rope_scaling must be a mapping like {{'rope_type': ...}} or None, not {rope_scaling!r}")
    if type(tie_embeddings) is not bool:
        raise HeadloomError(f"tie_embeddings must be true or false, not {tie_embeddings!r}")
    place = _device(device)
    backbone = family_named(family)
    names, made = _layers(
        specs,
        num_layers,
        max_positions,
        hidden_size=hidden_size,
        num_heads=num_heads,
        **({} if num_kv_heads is None else {"num_kv_heads": num_kv_heads}),
        **({} if head_dim is None else {"head_dim": head_dim}),
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling=_scaling(rope_scaling, max_positions),
    )
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
        "pad_token_id": pad_token_id,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }
    routed = _experts(experts=experts, experts_per_token=experts_per_token)
    config = config_class(backbone.name)(**backbone.own_config(sizes, [c.window for c in made], routed))
    layers = [spec_of(backbone, config, i, c, name) for i, (name, c) in enumerate(zip(names, made, strict=True))]
    register_heads(backbone)
    cls = model_class(backbone.name, backbone.head_classes()["AutoModelForCausalLM"])
    where = place if place.type == "meta" else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), where, no_init_weights():
        model = cls(grafted_config(config, layers, rotary=OWN_ROTARY))
    if place.type != "meta":
        with seeded_by_name(model, seed):
            model.initialize_weights()
    elif model._can_set_experts_implementation():  # the others read how many tokens an expert got
        model.set_experts_implementation("batched_mm")
    model.tie_weights()
    return model.to(place)


def _device(given: Any) -> torch.device:
    try:
        return torch.device("cpu" if given is None else given)
    except (RuntimeError, TypeError):
        raise HeadloomError(f"device must be one that PyTorch has here (cpu, cuda, meta), not {given!r}") from None


def _layers(specs: Any, num_layers: int, max_positions: int, **sizes: Any) -> tuple[list[str], list[AttentionConfig]]:
    """Mechanism names and configs, one per layer."""
    if isinstance(specs, str):
        specs = (specs, {})
    if isinstance(specs, tuple) and len(specs) == 2 and isinstance(specs[0], str):
        specs = layers_of(*as_spec(specs), num_layers=num_layers, tokens=max_positions)
    if not isinstance(specs, Sequence):
        raise HeadloomError(f"give a mechanism's name, (name, options), or a list of one per layer, not {specs!r}")
    specs = [as_spec(spec) for spec in specs]
    if len(specs) != num_layers:
        raise HeadloomError(
            f"{len(specs)} specs came for {num_layers} layers: give one for all, one per layer, or repeat a pattern "
            "with hl.schedule(pattern, num_layers=...)"
        )
    return [name for name, _ in specs], [layer_config(name, sizes, options) for name, options in specs]


def _scaling(rope_scaling: dict[str, Any] | None, max_positions: int) -> dict[str, Any] | None:
    return None if rope_scaling is None else {**rope_scaling, "max_position_embeddings": max_positions}


def _experts(**given: int | None) -> dict[str, int]:
    """Of the numbers of experts those that were given."""
    for name, value in given.items():
        if value is not None and (type(value) is not int or value < 1):
            raise HeadloomError(f"{name} must be an int of at least 1, not {value!r}")
    return {name: value for name, value in given.items() if value is not None}
