"""A study as people write it: a YAML file, or this object.

    name: equal_time                    # sizes: what is different at a size; `--size tiny` takes that block
    variants: [mha, gqa, "iha:pseudo_heads=2", {use: sas, label: my sas}]
    budgets: [{match: parameters, knob: F}, {match: time, knob: steps}]
    seeds: 3
    learning_rates: [0.001, 0.002, 0.004]

Everything is strict: an unknown key, or a value of another type, is refused before anything is done.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Strict, ValidationError, model_validator

from headloom.core.errors import HeadloomError, near
from headloom.lab.spec.resolved import Axis, Knob, Quantity, first_complaint, place_of
from headloom.train.config import EVALUATIONS


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 (without a point) as text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _one_or_more(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Text = Annotated[str, Strict(), Field(min_length=1)]
Int = Annotated[int, Strict(), Field(ge=1)]
Flag = Annotated[bool, Strict()]
Rate = Annotated[float, Strict(), BeforeValidator(_number), Field(gt=0, allow_inf_nan=False)]
Knobs = Annotated[tuple[Knob, ...], BeforeValidator(_one_or_more), Field(min_length=1)]


class _Written(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class WrittenVariant(_Written):
    """A variant, or several by `sweep`; also given as its `use` alone, or as a pair (use, options).

    use: "iha:pseudo_heads=2". options: more options of it, with YAML's types. label: what it is called. set: axes in
    which it is set apart, each declared in the study's `axes`. sweep: axis or option -> the values it takes, every
    combination a variant. knob: match -> the knob turned for this one. against: the label it is compared with.
    """

    use: Text
    options: dict[str, Any] = {}
    label: Text | None = None
    set: dict[Axis, Int] = {}
    sweep: dict[str, tuple[Any, ...]] = {}
    knob: dict[Quantity, Knobs] = {}
    against: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"use": value}
        pair = isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], Mapping)
        return {"use": value[0], "options": value[1]} if pair else value


class Budget(_Written):
    """match: what is made equal. knob: what is turned; of several the first ones come as near as they can, the last one
    must reach it. target: whose budget it is (the variant's own counterpart). tolerance: the relative difference
    that is still equal. convention: which FLOPs, "exact" (visible pairs) or "full" (all pairs).
    """

    match: Quantity
    knob: Knobs
    target: Text | None = None
    tolerance: Annotated[float, Strict(), Field(gt=0, lt=1)] | None = None
    convention: Literal["exact", "full"] = "exact"


class Backbone(_Written):
    """What is not the size's own. heads: each is width / heads wide unless head_dim is given. F: feed-forward."""

    layers: Int | None = None
    width: Int | None = None
    heads: Int | None = None
    head_dim: Int | None = None
    F: Int | None = None


def usual_engine() -> Literal["local", "inline"]:
    """The engine where none is named: "local", and "inline" on a system that cannot fork processes (Windows)."""
    return "local" if hasattr(os, "fork") else "inline"


class EngineOptions(_Written):
    """Where runs go: "local" (a process each, `workers` at a time; None: cores / threads), "inline" (this process, one
    after the other: for a debugger, and for Windows), or "ray" (`address` of a cluster; None: one on this machine).
    timeout: seconds a run may take. retries: of a run whose Ray worker died. checkpoint_seconds: training time between
    checkpoints. track: as --track.
    """

    name: Literal["local", "inline", "ray"] = Field(default_factory=usual_engine)
    workers: Int | None = None
    address: Text | None = None
    retries: Annotated[int, Strict(), Field(ge=0)] = 2
    timeout: Annotated[float, Strict(), Field(gt=0)] | None = None
    checkpoint_seconds: Annotated[float, Strict(), Field(ge=0)] = 60.0
    track: Text | None = None


class WrittenStudy(_Written):
    """A study as it is written (`hl.Study` is one that can be run). Values left out are the size's.

    config: a Hugging Face config of a decoder (a folder, or its JSON): every variant is that model with another
    attention; its sizes stand over the size's, and `backbone` over both. device: where runs train; auto: CUDA where
    there is one.
    text_column: of tables and data sets, the column that holds the text (None: "text"). options: mechanism ->
    options for every variant of it. axes: what variants may be set apart in besides the mechanism and the knobs.
    groups: settings of axes; every variant is run in each and compared within it. reference: the label the others
    are compared with. seeds: how many, or which. statistics: false lets one seed do. learning_rates: the grid; the
    best per variant is chosen on a text that is not reported. grid_seeds: how many seeds the grid is run with
    (None: all); the others run at the chosen rate. extend_grid: how many more rates a variant may try, each the
    next (in the same ratio) beyond the edge of the grid at which its best lies. evaluations: validations along
    every run besides the one at its end, each on so much text that all of them cost a tenth of the training at
    most. sizes: size -> keys of this study that are different there; from_yaml takes the block of its size and
    drops the others.
    """

    name: Text = "study"
    title: Annotated[str, Strict()] = ""
    question: Annotated[str, Strict()] = ""
    size: Text = "tiny"
    config: Text | None = None
    backbone: Backbone = Backbone()
    data: Text = "stdlib"
    text_column: Text | None = None
    tokenizer: Text = "bytes"
    tokens: Annotated[int, Strict(), Field(ge=2)] | None = None
    batch_size: Int | None = None
    steps: Annotated[int, Strict(), Field(ge=1, le=10_000_000)] | None = None
    variants: Annotated[tuple[WrittenVariant, ...], BeforeValidator(_one_or_more)] = Field(min_length=1)
    options: dict[str, dict[str, Any]] = {}
    axes: tuple[Axis, ...] = ()
    groups: tuple[dict[Axis, Int], ...] = ()
    reference: Text | None = None
    budgets: tuple[Budget, ...] = ()
    seeds: Annotated[int, Strict()] | tuple[Annotated[int, Strict(), Field(ge=0, lt=2**32)], ...] = 3
    statistics: Flag = True
    learning_rates: Annotated[tuple[Rate, ...], Field(min_length=1)] | None = None
    grid_seeds: Int | None = None
    extend_grid: Annotated[int, Strict(), Field(ge=0, le=10)] = 0
    validation_bytes: Int | None = None
    evaluations: Annotated[int, Strict(), Field(ge=0, le=1000)] = EVALUATIONS
    selection_bytes: Int | None = None
    threads: Int | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    compile: Literal["inductor", "aot_eager"] | None = None
    checkpoint_activations: Flag = False
    engine: EngineOptions = EngineOptions()
    sizes: dict[str, dict[str, Any]] = {}

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise HeadloomError(f"study: {_explain(error)}") from None

    @classmethod
    def from_yaml(cls, path: str | Path, *, size: str | None = None, settings: Sequence[str] = ()) -> Self:
        """The study in a file, or the ready one of that name.

        Args:
            size: takes the study's block for that size, if it has one.
            settings: ["steps=100", "engine.workers=1"]: keys over the file's.
        """
        from headloom.lab.spec.ready import read_study_file

        return cls.from_mapping(read_study_file(path), size=size, settings=settings)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], *, size: str | None = None, settings: Sequence[str] = ()) -> Self:
        """As from_yaml, from a mapping."""
        import yaml

        if not isinstance(values, Mapping):
            raise HeadloomError(f"a study is a mapping of keys to values, not {values!r}")
        whole = cls(**values)  # every size's block is checked, whichever is taken
        for name, block in whole.sizes.items():
            cls(**{**values, "sizes": {}, **block, "size": name})
        size = size or whole.size
        merged = {**values, **whole.sizes.get(size, {}), "size": size, "sizes": {}}
        for setting in settings:
            key, equals, text = setting.partition("=")
            if not equals or not key.strip():
                raise HeadloomError(f"--set must look like key=value (steps=100, say), not '{setting}'")
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                raise HeadloomError(f"--set {key}: '{text}' is not YAML") from None
            place, *inner = key.strip().split(".")
            for part in reversed(inner):
                value = {part: value}
            before = merged.get(place)
            merged[place] = _merged(before, value) if inner and isinstance(before, Mapping) else value
        return cls(**merged)

    def to_yaml(self) -> str:
        """A file that `from_yaml` reads back as this study; what is not set is left out."""
        import yaml

        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False, allow_unicode=True)


def _merged(before: Mapping[str, Any], value: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(before)
    for key, inner in value.items():
        old = found.get(key)
        both = isinstance(old, Mapping) and isinstance(inner, Mapping)
        found[key] = _merged(old, inner) if both else inner  # type: ignore[arg-type]
    return found


_PARTS: dict[str, type[BaseModel]] = {
    "variants": WrittenVariant,
    "budgets": Budget,
    "backbone": Backbone,
    "engine": EngineOptions,
}


def _explain(error: ValidationError) -> str:
    unknown = [found for found in error.errors() if found["type"] == "extra_forbidden"]
    if not unknown:
        return first_complaint(error)
    first = unknown[0]
    known = _PARTS.get(str(first["loc"][0]), WrittenStudy) if len(first["loc"]) > 1 else WrittenStudy
    name, names = str(first["loc"][-1]), list(known.model_fields)
    where = place_of(first["loc"][:-1])
    where = f" in {where}" if where else ""
    return f"unknown key '{name}'{where}.{near(name, names)} Known: {', '.join(names)}"
