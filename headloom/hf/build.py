"""Our own models: a Llama from transformers whose every layer has a Headloom attention, initialised by (seed, name)."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from headloom.attention import make_config
from headloom.attention.config import AttentionConfig
from headloom.core.errors import HeadloomError
from headloom.hf.adapter import spec_of
from headloom.hf.config import OWN_ROTARY, config_class, grafted_config
from headloom.hf.family import family_named
from headloom.hf.rope import to_parameters
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
    seed: int = 0,
    device: str | torch.device | None = None,
    pad_token_id: int | None = None,
    bos_token_id: int | None = None,
    eos_token_id: int | None = None,
) -> Any:
    """A `HeadloomLlamaForCausalLM` in float32, in training mode.

    Args:
        specs: (mechanism name, options) for all layers, or a list of one per layer. Options win over the sizes here.
        num_kv_heads: G, or None for each mechanism's own default.
        seed: every tensor is drawn from a generator seeded by (seed, its name): models of one seed share every tensor
            of equal name and shape, whatever their mechanisms and feed-forward widths.
        device: "meta" builds without memory, for counting.
    Raises:
        HeadloomError: unknown names, sizes that do not fit, or a number of specs that is not the number of layers.
    """
    from transformers.initialization import no_init_weights

    from headloom.hf.classes import model_class, register_heads

    family = family_named("llama")
    names, made = _layers(
        specs,
        num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        **({} if num_kv_heads is None else {"num_kv_heads": num_kv_heads}),
        **({} if head_dim is None else {"head_dim": head_dim}),
        norm_eps=norm_eps,
        rope_theta=rope_theta,
        rope_scaling=_scaling(rope_scaling, max_positions),
    )
    config = config_class(family.name)(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=max(c.num_kv_heads or 1 for c in made),
        head_dim=made[0].head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=norm_eps,
        tie_word_embeddings=tie_embeddings,
        rope_parameters=to_parameters(rope_theta, rope_scaling),
        attention_dropout=made[0].dropout,
        pad_token_id=pad_token_id,
        bos_token_id=bos_token_id,
        eos_token_id=eos_token_id,
        **_windows([c.window for c in made]),
    )
    layers = [spec_of(family, config, i, c, name) for i, (name, c) in enumerate(zip(names, made, strict=True))]
    register_heads(family)
    cls = model_class(family.name, family.head_classes()["AutoModelForCausalLM"])
    device = torch.device("cpu" if device is None else device)
    place = device if device.type == "meta" else contextlib.nullcontext()
    with torch.random.fork_rng(devices=[]), place, no_init_weights():
        model = cls(grafted_config(config, layers, rotary=OWN_ROTARY))
    if device.type != "meta":
        with seeded_by_name(model, seed):
            model.initialize_weights()
    model.tie_weights()
    return model.to(device)


def _layers(specs: Any, num_layers: int, **sizes: Any) -> tuple[list[str], list[AttentionConfig]]:
    """Mechanism names and configs, one per layer."""
    if num_layers < 1:
        raise HeadloomError(f"num_layers must be at least 1, not {num_layers}")
    if isinstance(specs, str):
        specs = (specs, {})
    if isinstance(specs, tuple) and len(specs) == 2 and isinstance(specs[0], str):
        specs = [specs] * num_layers
    specs = [(spec, {}) if isinstance(spec, str) else spec for spec in specs]
    if len(specs) != num_layers:
        raise HeadloomError(f"{len(specs)} specs came for {num_layers} layers: give one for all, or one per layer")
    return [name for name, _ in specs], [make_config(name, **{**sizes, **options}) for name, options in specs]


def _scaling(rope_scaling: dict[str, Any] | None, max_positions: int) -> dict[str, Any] | None:
    return None if rope_scaling is None else {**rope_scaling, "max_position_embeddings": max_positions}


def _windows(windows: list[int | None]) -> dict[str, Any]:
    """The config's own windows, so that transformers' cache drops what no layer can see any more."""
    widths = {w for w in windows if w is not None}
    if len(widths) != 1:
        return {}  # none; or several, of which a config can say only one: the cache then keeps everything
    if None not in windows:
        return {"sliding_window": widths.pop()}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    return {"sliding_window": widths.pop(), "layer_types": kinds}
