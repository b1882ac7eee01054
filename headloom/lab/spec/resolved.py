"""A resolved study: every value is filled in, and nothing depends on a default that could change later.

`headloom.lab.spec.study.Study` is what people write; `headloom.lab.spec.resolve` makes this of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headloom.core.errors import HeadloomError
from headloom.lab.spec.options import option_text

Count = Annotated[int, Field(ge=1)]
LONGEST_STEPS = 10_000_000

Quantity = Literal["parameters", "flops", "cache", "time", "tokens"]
Knob = Literal["F", "layers", "heads", "width", "steps"]
Axis = Literal["F", "layers", "heads", "head_dim", "width", "steps", "tokens", "batch_size"]

# What each knob changes. A budget can be kept only if its knob changes it and no later knob changes it again.
MOVES: dict[str, frozenset[str]] = {
    "F": frozenset({"parameters", "flops", "time"}),
    "layers": frozenset({"parameters", "flops", "time", "cache"}),
    "heads": frozenset({"parameters", "flops", "time", "cache"}),
    "width": frozenset({"parameters", "flops", "time", "cache"}),
    "steps": frozenset({"flops", "time", "tokens"}),
}
# The fields of a run's configuration that each knob or axis may change.
FIELDS: dict[str, tuple[str, ...]] = {
    "F": ("intermediate_size",),
    "layers": ("num_layers",),
    "heads": ("num_heads", "head_dim"),
    "head_dim": ("head_dim",),
    "width": ("hidden_size", "head_dim", "intermediate_size"),
    "steps": ("steps", "warmup_steps"),
    "tokens": ("tokens",),
    "batch_size": ("batch_size", "eval_batch_size"),
}


# What every layer of every variant takes from the model's size: a variant that sets one is not a variant of attention.
OF_THE_SIZE = ("hidden_size", "num_heads", "head_dim")


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class Shape(_Strict):
    """The backbone's sizes and the length of training of one variant; `tokens` is the context."""

    num_layers: Count
    hidden_size: Count
    num_heads: Count
    head_dim: Count
    intermediate_size: Count
    tokens: int = Field(ge=2)
    batch_size: Count
    steps: int = Field(ge=1, le=LONGEST_STEPS)

    @property
    def warmup_steps(self) -> int:
        """A tenth of the steps, at most 1000."""
        return min(1000, self.steps // 10)

    @property
    def tokens_a_step(self) -> int:
        """Predicted ones: all of a row but the first."""
        return self.batch_size * (self.tokens - 1)

    @property
    def tokens_trained(self) -> int:
        """Tokens predicted in the whole run."""
        return self.steps * self.tokens_a_step


class Variant(_Strict):
    """One attention that is compared: a mechanism or a schedule of layers by name, its options, and how it is compared.

    options: as given, each of the type its config has; what is not given is the mechanism's own default. defaulted:
    the options that came from defaults.toml. label: what it goes by in tables and folders.
    Of a study: against: the label of the variant it is compared with, None for one that others are compared with.
    group: how the labels of its group end. shape: before budgets are matched. settings: the axes in which it was set
    apart. knobs: match -> the knobs turned for it, where they are its own.
    """

    label: str = ""
    mechanism: str
    options: dict[str, Any] = {}
    defaulted: tuple[str, ...] = ()
    against: str | None = None
    group: str = ""
    shape: Shape | None = None
    settings: dict[str, int] = {}
    knobs: dict[Quantity, tuple[Knob, ...]] = {}

    @property
    def text(self) -> str:
        """Mechanism and options as one writes them; the text that is read back as they are."""
        given = (f"{name}={option_text(value)}" for name, value in sorted(self.options.items()))
        return ":".join([self.mechanism, *given])

    @property
    def notes(self) -> list[str]:
        """A sentence on each option that nobody gave and that is not the mechanism's own default either."""
        return [
            f"{self.label or self.mechanism} runs with {name}={option_text(self.options[name])}: the comparison's "
            "default, used where none is given."
            for name in self.defaulted
        ]

    def layers(self, shape: Shape) -> list[tuple[str, dict[str, Any]]]:
        """(mechanism, options) of every layer of a model of this shape."""
        from headloom.mechanism.schedules import layers_of

        found = layers_of(self.mechanism, self.options, num_layers=shape.num_layers, tokens=shape.tokens)
        for mechanism, options in found:
            refuse_sizes(mechanism, options)
        return found


def refuse_sizes(mechanism: str, options: Mapping[str, Any]) -> None:
    """Refuse options that every layer of every variant takes from the model's size."""
    for name in OF_THE_SIZE:
        if name in options:
            raise HeadloomError(f"{mechanism} sets {name}, which all variants share: choose it for all with --size")


class BudgetSpec(_Strict):
    """What is made equal, by turning what, to whose (None: that of the variant one is compared with)."""

    match: Quantity
    knobs: tuple[Knob, ...] = Field(min_length=1)
    tolerance: float = Field(gt=0, lt=1)
    target: str | None = None
    convention: Literal["exact", "full"] = "exact"

    def knobs_of(self, variant: Variant) -> tuple[Knob, ...]:
        """The knobs turned for a variant: its own if it names some, else the budget's."""
        return variant.knobs.get(self.match, self.knobs)


class StudySpec(_Strict):
    """A study: variants, what is equal among them, and how often and how they are trained.

    backbone: the fields of a Hugging Face config around whose model every variant is built, read from `config`; it says
    itself whether embeddings are tied, and how positions rotate. device: None: CUDA where there is one.
    """

    kind: Literal["compare", "study"]
    name: str
    title: str
    question: str
    size: str
    variants: tuple[Variant, ...] = Field(min_length=2)
    reference: str
    budgets: tuple[BudgetSpec, ...]
    axes: tuple[Axis, ...]
    tie_embeddings: bool | None
    rope_theta: float | None = Field(gt=0)
    backbone: dict[str, Any] | None = None
    config: str | None = None
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**32)], ...] = Field(min_length=1)
    grid_seeds: Count
    learning_rates: tuple[Annotated[float, Field(gt=0, allow_inf_nan=False)], ...] = Field(min_length=1)
    extend_grid: int = Field(default=0, ge=0)
    data: str = Field(min_length=1)
    text_column: str | None = Field(default=None, min_length=1)
    tokenizer: str = Field(min_length=1)
    validation_bytes: Count
    evaluations: int = Field(ge=0)
    evaluation_bytes: Count
    selection_bytes: Count | None
    threads: Count
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["float32", "bfloat16"]
    compile: Literal["inductor", "aot_eager"] | None
    checkpoint_activations: bool

    def variant(self, label: str) -> Variant:
        """The variant of that label."""
        return next(variant for variant in self.variants if variant.label == label)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Label -> the sizes and length of training before budgets are matched."""
        return {variant.label: variant.shape for variant in self.variants if variant.shape is not None}

    @property
    def against(self) -> dict[str, str | None]:
        """Label -> the label it is compared with."""
        return {variant.label: variant.against for variant in self.variants}

    def budget(self, match: Quantity) -> BudgetSpec | None:
        """The budget that makes this quantity equal, if the study has one."""
        return next((budget for budget in self.budgets if budget.match == match), None)

    def target(self, budget: BudgetSpec, variant: Variant) -> str | None:
        """The label whose budget `variant` is to have; None where it sets its own."""
        found = budget.target + variant.group if budget.target else variant.against
        return None if found == variant.label else found

    @property
    def steps(self) -> int:
        """Of the reference."""
        return self.shapes[self.reference].steps

    @property
    def has_grid(self) -> bool:
        """Whether learning rates are tried and the best one chosen for each variant."""
        return len(self.learning_rates) > 1


def place_of(keys: Sequence[str | int]) -> str:
    """Where in a study file a value stands, in words.

    >>> place_of(["backbone", "layers"]), place_of(["learning_rates", 1]), place_of(["variants", 0, "use"])
    ('backbone.layers', 'entry 2 of learning_rates', 'use in entry 1 of variants')
    """
    found = ""
    for key in keys:
        if isinstance(key, int):
            found = f"entry {key + 1} of {found}"
        elif found.startswith("entry "):
            found = f"{key} in {found}"
        else:
            found = f"{found}.{key}" if found else str(key)
    return found


def first_complaint(error: ValidationError) -> str:
    """Pydantic's complaint as one line: the field, what is allowed, what came."""
    first = error.errors()[0]
    where = place_of(first["loc"]) or "the study"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    return f"{where}: {message}, not {first['input']!r}"


def identity(*parts: Any) -> str:
    """Twelve hexadecimal digits that are equal for equal JSON values."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
