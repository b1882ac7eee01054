"""A Hugging Face config as the backbone of models of our own: its sizes, norms and rotary embedding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.core.files import read_json
from headloom.hf.model.rope import from_parameters

FAMILY = "llama"
"""The family whose layers `build_model` builds around the attention of a comparison."""

# what must have this value, since our layers have nothing else: name -> (value, what it is)
_FIXED = {
    "hidden_act": ("silu", "the feed-forward's activation"),
    "mlp_bias": (False, "biases in the feed-forward"),
    "attention_bias": (False, "biases in the attention (give a variant qkv_bias=true instead)"),
    "attention_dropout": (0.0, "dropout in the attention (give a variant dropout=... instead)"),
}
_STRETCHED = ("yarn", "longrope", "llama3")
"""Scalings that start from the context of a config."""


def read_backbone(path: str | Path) -> dict[str, Any]:
    """What `build_model` is to be given besides the attention, from a folder's config.json or a JSON file.

    {"num_layers", "hidden_size", "num_heads", "head_dim", "intermediate_size", "tie_embeddings", "rope_theta",
    "rope_scaling", "norm_eps"}. The vocabulary is the tokenizer's, the context the caller's, and the number of
    key/value heads the attention's.

    Raises HeadloomError: no config there, or one of a family or with a switch that is not built here.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    place = Path(path).expanduser()
    file = place / "config.json" if place.is_dir() else place
    values = read_json(file)
    if values is None or "model_type" not in values:
        raise HeadloomError(
            f"'{path}' holds no Hugging Face config: give a folder with a config.json, or such a JSON file with its "
            "model_type"
        )
    if values["model_type"] != FAMILY:
        raise HeadloomError(
            f"'{path}' is the config of a {values['model_type']} model; the models of a comparison are built as "
            f"{FAMILY} models: give a {FAMILY} config, or the sizes alone (layers, width, heads), or graft into the "
            "model itself"
        )
    try:
        config = CONFIG_MAPPING[FAMILY].from_dict(values)
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        raise HeadloomError(
            f"'{path}' is not a config that transformers reads: {' '.join(str(error).split())}"
        ) from None
    for name, (allowed, what) in _FIXED.items():
        if getattr(config, name, allowed) != allowed:
            raise HeadloomError(
                f"'{path}' has {name} {getattr(config, name)!r}: {what}. Models built here have {allowed!r}: change it "
                "in a copy of the config"
            )
    theta, scaling = from_parameters(config.rope_parameters, config.max_position_embeddings)
    if scaling is not None:
        most = scaling.pop("max_position_embeddings")
        if scaling["rope_type"] in _STRETCHED:  # which otherwise take the context they are built for
            scaling.setdefault("original_max_position_embeddings", most)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": config.head_dim or config.hidden_size // config.num_attention_heads,
        "intermediate_size": config.intermediate_size,
        "tie_embeddings": config.tie_word_embeddings,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "norm_eps": config.rms_norm_eps,
    }
