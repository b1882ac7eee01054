"""A grafted model's config: in memory the family's own, with one more field; on disk a folder no other class can read.

In memory `model_type` stays the family's, because transformers keys weight conversions and tables on it. The written
config.json nests the family's fields (without a model_type) under `backbone` and puts a sentence where an int belongs,
so that every other class fails at once and says what the folder is, instead of loading it with weights dropped.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from huggingface_hub.dataclasses import strict

from headloom.core.errors import HeadloomError
from headloom.hf.model.family import Family, family_named
from headloom.hf.places import MODEL_TYPE

PREFIX = "Headloom"
"""Of the names of the classes made here: HeadloomLlamaForCausalLM."""
FORMAT = 1
FAMILY_ROTARY, OWN_ROTARY = "family", "own"
"""Whose cos and sin turn queries and keys: a graft repeats the original's rounding, our models keep wider tables."""
FAMILY_PROJECTIONS, OWN_PROJECTIONS = "family", "own"
"""Whose projections an attention has: a graft takes the original's; models that are built around an attention have
q_proj, k_proj, v_proj and o_proj in every family, so that all variants start from the same ones."""


def what_it_is(family: str) -> str:
    """What a class that cannot load a saved graft shows its user."""
    return (
        f"This folder holds a Headloom graft of a {family} model, whose attention has weights that other classes would "
        "drop. Write `import headloom` and load it with an Auto class (AutoModelForCausalLM, AutoModel, ...)"
    )


class GraftConfig:
    """Mixin before a family's config class: adds the field `headloom` and reads and writes the form on disk."""

    headloom: dict[str, Any] | None

    @classmethod
    def get_config_dict(cls, name: Any, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        values, kwargs = super().get_config_dict(name, **kwargs)  # type: ignore[misc]
        return (in_family_form(values) if values.get("model_type") == MODEL_TYPE else values), kwargs

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        if config_dict.get("model_type") == MODEL_TYPE:
            config_dict = in_family_form(config_dict)
        return super().from_dict(config_dict, **kwargs)  # type: ignore[misc]

    def validate_architecture(self) -> None:
        """A family may ask that heads divide the width; here `head_dim` is free."""
        if not getattr(self, "head_dim", None):
            super().validate_architecture()  # type: ignore[misc]

    def to_json_file(self, json_file_path: Any, use_diff: bool = True) -> None:
        """Write the nested form (module docstring)."""
        values = json.loads(self.to_json_string(use_diff))  # type: ignore[attr-defined]
        family = values.pop("model_type")
        graft = values.pop(MODEL_TYPE, None)
        written = {
            "model_type": MODEL_TYPE,
            "family": family,
            "architectures": values.pop("architectures", None),
            _width(family): what_it_is(family),
            "transformers_version": values.pop("transformers_version", None),
            MODEL_TYPE: graft,
            "backbone": values,
        }
        with open(json_file_path, "w", encoding="utf-8") as file:
            file.write(json.dumps(written, indent=2) + "\n")


def in_family_form(values: dict[str, Any]) -> dict[str, Any]:
    """The nested form on disk -> the family's flat form with the field `headloom`."""
    if not isinstance(values.get("backbone"), dict) or not isinstance(values.get(MODEL_TYPE), dict):
        raise HeadloomError("config.json says model_type 'headloom' but lacks 'backbone' or 'headloom': it is damaged")
    if values[MODEL_TYPE].get("format", FORMAT) > FORMAT:
        raise HeadloomError(
            f"config.json has format {values[MODEL_TYPE]['format']}, newer than {FORMAT}: update headloom"
        )
    flat = {**values["backbone"], "model_type": values.get("family"), MODEL_TYPE: values[MODEL_TYPE]}
    outer = ("family", "backbone", _width(values.get("family")), "model_type", MODEL_TYPE)
    return {**flat, **{k: v for k, v in values.items() if k not in outer}}


def _width(family: Any) -> str:
    """The family's own name for the hidden size, an int that its class checks."""
    return family_named(family).config_class().attribute_map.get("hidden_size", "hidden_size")


@functools.cache
def config_class(family_name: str) -> Any:
    """`HeadloomLlamaConfig` for "llama": a subclass of the family's config class, importable by its name."""
    base = family_named(family_name).config_class()
    body = {
        "__annotations__": {MODEL_TYPE: dict[str, Any] | None},
        MODEL_TYPE: None,
        "__module__": "headloom.hf.model.classes",
    }
    return strict(type(f"{PREFIX}{base.__name__}", (GraftConfig, base), body))


def grafted_config(
    config: Any,
    layers: Sequence[dict[str, Any] | None],
    *,
    rotary: str = FAMILY_ROTARY,
    projections: str = FAMILY_PROJECTIONS,
) -> Any:
    """A copy of a family's config, of our class, that says what each layer is (None: the family's own attention)."""
    values = config.to_dict()
    cls = config_class(values["model_type"])
    said = {"format": FORMAT, "rotary": rotary, "layers": list(layers)}
    if projections != FAMILY_PROJECTIONS:
        said["projections"] = projections
    out = cls.from_dict({**values, MODEL_TYPE: said})
    out._attn_implementation_internal = config._attn_implementation
    out._experts_implementation_internal = config._experts_implementation
    out._name_or_path = config._name_or_path
    return out


def specs_in(config: Any, family: Family) -> list[dict[str, Any] | None]:
    """Per layer {"mechanism": name, "options": {...}} or None. Raises HeadloomError if the config says nothing."""
    graft = getattr(config, MODEL_TYPE, None)
    count = config.num_hidden_layers
    if not isinstance(graft, dict) or not isinstance(graft.get("layers"), list):
        raise HeadloomError(
            "this config does not say what the attention is. Give it, for instance "
            'headloom={"layers": [{"mechanism": NAME}] * ' + f"{count}" + "}, or use hl.graft on a loaded model"
        )
    layers = graft["layers"]
    if len(layers) != count:
        raise HeadloomError(
            f"the config describes {len(layers)} layers' attention, the {family.name} model has {count}: "
            "give num_hidden_layers and the list of layers the same length"
        )
    for index, layer in enumerate(layers):
        if layer is not None and (not isinstance(layer, dict) or not isinstance(layer.get("mechanism"), str)):
            raise HeadloomError(
                f'layer {index} must be null or {{"mechanism": name, "options": {{...}}}}, not {layer!r}'
            )
    return layers
