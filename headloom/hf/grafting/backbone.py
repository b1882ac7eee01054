"""A Hugging Face config as the backbone of models built around an attention: everything but the attention is its own.

Norms, feed-forward, embeddings, positions and initialisation are the family's; what its config says about its own
attention (key/value heads, windows, rotary, soft-cap, biases, dropout) is what the variants are given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.core.files import read_json
from headloom.hf.model.config import MODEL_TYPE, config_class
from headloom.hf.model.family import Encoder, Family, families, family_named

SIZES = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
}
"""Our names of a model's sizes -> those of Llama's config."""

# of the checkpoint that a config came with, or of its tokenizer: not of the model
_LEFT_OUT = ("architectures", "transformers_version", "dtype", "torch_dtype", "vocab_size", "_name_or_path")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_backbone(path: str | Path) -> dict[str, Any]:
    """The config in a folder's config.json or in a JSON file, whole, as JSON values: what `build_around` and a run's
    file take as `backbone`. Vocabulary and special tokens are left out: they are the tokenizer's.

    Raises HeadloomError: no config there, or not one of a decoder that is built here.
    """
    place = Path(path).expanduser()
    file = place / "config.json" if place.is_dir() else place
    if not file.exists():
        raise HeadloomError(f"'{path}' holds no Hugging Face config: {file} does not exist")
    values = read_json(file)
    if values is None or not isinstance(values.get("model_type"), str):
        raise HeadloomError(
            f"'{path}' holds no Hugging Face config: give a folder with a config.json, or such a JSON file with its "
            "model_type"
        )
    return complete(values, f"'{path}'")


def complete(values: Mapping[str, Any], source: str = "the backbone") -> dict[str, Any]:
    """A decoder's config with every field that its class has. `source` is what errors call it.

    Raises HeadloomError: a config that is no decoder's, needs code or quantized weights of its own, or cannot be read.
    """
    name = values.get("model_type")
    known = [family.name for family in families().values() if not isinstance(family, Encoder)]
    give = f"give the config of one of {', '.join(known)}"
    if name == MODEL_TYPE:
        raise HeadloomError(f"{source} is the config of a graft: give that of the model it was made from")
    if values.get("auto_map"):
        raise HeadloomError(
            f"{source} needs code of its own (auto_map), and no code from a config is run: {give}, or take auto_map "
            "out of a copy if it is such a model"
        )
    if values.get("quantization_config"):
        raise HeadloomError(f"{source} is the config of a quantized model: take quantization_config out of a copy")
    if name not in known and name not in families():
        refused = [family.refused[name] for family in families().values() if name in family.refused]
        why = f": {refused[0]}" if refused else f", which is not built here: {give}"
        raise HeadloomError(f"{source} is the config of a '{name}' model{why}")
    if name not in known:
        raise HeadloomError(
            f"{source} is the config of a '{name}' model, an encoder, and models here learn to predict the next "
            f"token: {give}"
        )
    family = family_named(name)
    config = _made(family, values, source)
    if not family.causal(config):
        raise HeadloomError(
            f"{source} is the config of a '{name}' model whose tokens see later ones, and models here learn to predict "
            "the next token: change that in a copy"
        )
    family.common(config, 0)  # refuses what cannot be repeated
    found = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in found.items() if key not in (*_LEFT_OUT, *_TOKENS, MODEL_TYPE)}


def sizes_of(values: Mapping[str, Any]) -> dict[str, int]:
    """A config's "num_layers", "hidden_size", "num_heads", "head_dim" and "intermediate_size"."""
    family, config = family_named(values["model_type"]), config_of(values)
    return {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_heads": config.num_attention_heads,
        "head_dim": family.common(config, 0)["head_dim"],
        "intermediate_size": family.feed_forward_width(config),
    }


def sized(values: Mapping[str, Any], **sizes: int) -> dict[str, Any]:
    """The config's fields with other sizes (those of `sizes_of`), under the family's own names.

    What follows from them comes along: as many query heads share a key/value head as before, another depth goes on with
    (or stops within) the pattern of layer types.

    Raises HeadloomError for sizes that the family cannot have.
    """
    family, before = family_named(values["model_type"]), sizes_of(values)
    sizes = {**before, **sizes}
    H, K, D = sizes["num_heads"], sizes["head_dim"], sizes["hidden_size"]
    if not family.free_head_dim and H * K != D:
        raise HeadloomError(
            f"the heads of a {family.name} model fill its width: {H} heads of width {K} do not make {D}; give heads "
            "that divide the width, and no head_dim"
        )
    names = {**family.config_class().attribute_map, **family.size_names}
    fields = {names.get(theirs, theirs): sizes[ours] for ours, theirs in SIZES.items()}
    if not family.free_head_dim:
        del fields["head_dim"]
    if (G := values.get("num_key_value_heads")) is not None:
        fields["num_key_value_heads"] = _key_value_heads(G, before["num_heads"], H)
    if kinds := values.get("layer_types"):
        period = next(p for p in range(1, len(kinds) + 1) if kinds[p:] == kinds[:-p])
        count = sizes["num_layers"]
        fields["layer_types"] = (kinds + [kinds[i % period] for i in range(len(kinds), count)])[:count]
    for name in family.head_dim_names:
        if values.get(name) == before["head_dim"]:
            fields[name] = K
    return {**values, **fields}


def _key_value_heads(G: int, before: int, H: int) -> int:
    """Key/value heads for H heads: 1 stays 1; otherwise as many heads share one as before."""
    if G == 1:
        return 1
    if H * G % before:
        group = before // G
        raise HeadloomError(
            f"the config's {before} heads share {G} key/value heads, {group} a head: give a number of heads that is a "
            f"multiple of {group}, not {H}"
        )
    return H * G // before


def config_of(values: Mapping[str, Any], *, tokens: int | None = None, **fields: Any) -> Any:
    """The config object, of our class for the family, with `fields` over the values. tokens: the context it must hold.

    Raises HeadloomError for fields that transformers refuses, and a context longer than learned positions.
    """
    family = family_named(values["model_type"])
    config = _made(family, {**dict.fromkeys(_TOKENS), **values, **fields}, f"the {family.name} config")
    most = config.max_position_embeddings
    if tokens is not None and tokens > most and family.common(config, 0)["rope_theta"] is None:
        raise HeadloomError(
            f"a context of {tokens} tokens is longer than the config's {most} learned positions: give a shorter "
            "context, or more positions in a copy of the config"
        )
    return config


def _made(family: Family, values: Mapping[str, Any], source: str) -> Any:
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class(family.name).from_dict(dict(values))
    except (StrictDataclassError, ValueError, TypeError, AttributeError, KeyError) as error:
        if isinstance(error, HeadloomError):
            raise
        raise HeadloomError(
            f"{source} is not a config that transformers reads: {' '.join(str(error).split())}"
        ) from None


def attention_facts(values: Mapping[str, Any], *, tokens: int | None = None, **sizes: int) -> list[dict[str, Any]]:
    """What every layer's attention is in the config's own model, as fields of `AttentionConfig`, with other sizes."""
    family, config = family_named(values["model_type"]), config_of(sized(values, **sizes), tokens=tokens)
    return [family.common(config, index) for index in range(config.num_hidden_layers)]


def keeping_enough(family: Family, config: Any, windows: Sequence[int | None]) -> Any:
    """The config, or one without windows where a layer sees further than it says: transformers' cache drops what lies
    behind the config's windows."""
    own = [family.common(config, index).get("window") for index in range(len(windows))]
    if all(mine is None or (given is not None and given <= mine) for mine, given in zip(own, windows, strict=True)):
        return config
    values = config.to_dict()
    kinds = (
        {"layer_types": ["full_attention"] * len(windows)} if values.get("layer_types") else {"sliding_window": None}
    )
    return type(config).from_dict({**values, **kinds})
