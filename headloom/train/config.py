"""The configuration of one run: everything that determines its numbers. It is checked strictly and cannot be changed,
and it is written beside the run's results.

torch is imported only to find out whether there is a GPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationError, model_validator

from headloom.core.errors import HeadloomError, near

EVALUATIONS = 10
"""Number of validations during a run, if it is not given."""
EVALUATION_SHARE = 0.1
"""What all of them together may cost, as a share of the training."""


def evaluation_bytes(tokens_trained: int, evaluations: int) -> int:
    """Bytes of validation text that each evaluation during a run reads: the largest power of two with which all of them
    together cost at most 10 % of the training, and at least 1024, because less text gives no useful estimate.

    It is assumed that a forward pass costs a third of a training step, and that a token stands for at least one byte.

    >>> evaluation_bytes(300 * 8 * 127, 10)  # 304,800 tokens: 0.1 * 3 * 304,800 / 10 = 9,144
    8192
    """
    allowed = 3 * EVALUATION_SHARE * tokens_trained / max(1, evaluations)
    return 2 ** max(10, math.floor(math.log2(max(1.0, allowed))))


class LayerSpec(NamedTuple):
    """A mechanism's name and its options, as in `hl.attention(mechanism, **options)`."""

    mechanism: Annotated[str, Field(min_length=1)]
    options: dict[str, Any] = {}  # noqa: RUF012  # nobody writes into it


def _by_name(value: Any) -> Any:
    """A mechanism's name alone is one without options."""
    return (value,) if isinstance(value, str) else value


Layer = Annotated[LayerSpec, BeforeValidator(_by_name), PlainSerializer(LayerSpec._asdict)]


class Recipe(BaseModel):
    """How any model is trained: data, optimizer, machine and measurements.

    `train` replaces values that are None and records the result: `vocab_size` (from the tokenizer), `threads`, `device`
    and `eval_batch_size` (the batch size of one accumulation step); `fingerprint` and `evaluation_bytes` come from the
    data (if they are given, they must agree with it).

    Raises HeadloomError (one line) for unknown fields, wrong types, and values that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1)
    # the data
    vocab_size: int | None = Field(default=None, ge=2)
    tokens: int = Field(
        default=256, ge=2, description="context: tokens a row, of which all but the first are predicted"
    )
    batch_size: int = Field(default=8, ge=1, description="rows an optimizer step, over all accumulation steps")
    accumulation_steps: int = Field(default=1, ge=1)
    fingerprint: str | None = None
    # the optimizer
    steps: int = Field(ge=1)
    learning_rate: float = Field(default=1e-3, gt=0)
    final_learning_rate: float = Field(
        default=0.1, ge=0, le=1, description="where the cosine ends, as a share of learning_rate"
    )
    warmup_steps: int = Field(default=0, ge=0)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = Field(default=1e-8, gt=0)
    clip: float = Field(default=1.0, gt=0, description="largest gradient norm")
    # the machine
    seed: int = Field(default=0, ge=0, lt=2**32)
    threads: int | None = Field(default=None, ge=1)
    device: Literal["cpu", "cuda"] | None = None
    dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="bfloat16: autocast over float32 weights"
    )
    compile: Literal["inductor", "aot_eager"] | None = Field(default=None, description="torch.compile's backend")
    checkpoint_activations: bool = Field(
        default=False, description="keep no activations, compute them again in the backward pass"
    )
    # the measurements
    evaluations: int = Field(
        default=0, ge=0, description="validations along the way, evenly spaced, besides the one at the end"
    )
    evaluation_bytes: int | None = Field(
        default=None, ge=1, description="of the part of the validation text that those along the way read"
    )
    eval_batch_size: int | None = Field(default=None, ge=1)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise HeadloomError(_one_line(error, type(self).model_fields)) from None

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size {self.batch_size} does not divide into accumulation_steps {self.accumulation_steps}"
            )
        if self.warmup_steps > self.steps:
            raise ValueError(
                f"warmup_steps {self.warmup_steps} exceeds steps {self.steps}: at most all steps can warm up"
            )
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas {self.betas} must lie in [0, 1)")
        return self

    @property
    def micro_batch_size(self) -> int:
        """Sequences in one forward pass."""
        return self.batch_size // self.accumulation_steps

    @property
    def tokens_trained(self) -> int:
        """Tokens predicted in the whole run."""
        return self.steps * self.batch_size * (self.tokens - 1)

    @property
    def evaluation_steps(self) -> tuple[int, ...]:
        """The steps after which the model is evaluated for its curve: `evaluations` evenly spaced ones, and the last
        step. Empty if `evaluations` is 0."""
        parts = self.evaluations + 1
        ends = {-(-part * self.steps // parts) for part in range(1, parts + 1)}
        return tuple(sorted(ends)) if self.evaluations else ()

    def to_dict(self) -> dict[str, Any]:
        """A dictionary of JSON values, from which `RunConfig(**values)` builds an equal configuration."""
        return self.model_dump(mode="json")


_OF_THE_BACKBONE = {"tie_embeddings", "rope_theta", "rope_scaling", "norm_eps"}


class RunConfig(Recipe):
    """One training run of a model of our own.

    `specs` is one mechanism for all layers or one per layer; an item may be given as a name or a pair (name,
    options). Sizes are named as in Hugging Face's Llama.

    `backbone`: the fields of a Hugging Face config, including its model_type. The model is then built from that config,
    with the sizes and the attention given here. tie_embeddings, rope_theta, rope_scaling and norm_eps come from the
    config and must not be given. None: a Llama.
    """

    specs: tuple[Layer, ...] = Field(min_length=1)
    hidden_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int | None = Field(default=None, ge=1)
    head_dim: int | None = Field(default=None, ge=1)
    intermediate_size: int = Field(ge=1)
    tie_embeddings: bool = True
    rope_theta: float | None = Field(default=10000.0, gt=0)
    rope_scaling: dict[str, Any] | None = None
    norm_eps: float = Field(default=1e-6, gt=0)
    backbone: dict[str, Any] | None = None
    evaluations: int = Field(default=EVALUATIONS, ge=0, description=Recipe.model_fields["evaluations"].description)

    def __init__(self, **values: Any) -> None:  # for type checkers: specs come in any form that LayerSpec reads
        super().__init__(**values)

    @model_validator(mode="after")
    def _specs_fit(self) -> Self:
        if len(self.specs) not in (1, self.num_layers):
            raise ValueError(
                f"specs has {len(self.specs)} mechanisms for {self.num_layers} layers: give one, or one per layer"
            )
        said = _OF_THE_BACKBONE & self.model_fields_set
        if self.backbone is not None and said:
            raise ValueError(f"{', '.join(sorted(said))} came beside a backbone, which says that itself: leave one out")
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; what a backbone says itself is left out where there is one."""
        return self.model_dump(mode="json", exclude=_OF_THE_BACKBONE if self.backbone else {"backbone"})


class GraftSpec(BaseModel):
    """The arguments of `hl.graft(model, mechanism, layers=..., **options)`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    mechanism: str = Field(min_length=1)
    options: dict[str, Any] = Field(default_factory=dict)
    layers: str | None = None
    allow_change: bool = False


class FineTuneConfig(Recipe):
    """One fine-tuning run of the checkpoint `model` (a folder, a GGUF file, a name on the hub), grafted or not."""

    model: str = Field(min_length=1)
    graft: GraftSpec | None = None
    mix_learning_rate: float | None = Field(
        default=None, gt=0, description="peak rate of what a graft adds; None: learning_rate"
    )


@dataclasses.dataclass(frozen=True)
class Arm:
    """A checkpoint and the attention that is grafted into it before training (None: no graft)."""

    model: str
    graft: GraftSpec | None = None


def fine_tunings(arms: Mapping[str, Arm], seeds: int, **recipe: Any) -> dict[tuple[str, int], FineTuneConfig]:
    """The runs of a fine-tuning, by arm and seed, in the order in which they are made: all arms of one seed, then the
    next seed, so that finished runs can be compared early. Raises HeadloomError for a wrong recipe."""
    if seeds < 1 or not arms:
        raise HeadloomError(f"seeds must be at least 1, not {seeds}" if arms else "name at least one arm")
    return {
        (name, seed): FineTuneConfig(**recipe, name=name, seed=seed, model=arm.model, graft=arm.graft)
        for seed in range(seeds)
        for name, arm in arms.items()
    }


def check_device(device: str | None) -> None:
    """Raise HeadloomError for "cuda" if torch finds no CUDA device. torch is imported for this check only."""
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise HeadloomError("device 'cuda' was asked for, but torch sees none: use device 'cpu', or leave it out")


def _one_line(error: ValidationError, fields: Any) -> str:
    parts = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            parts.append(f"unknown field '{where}'.{near(where, fields)} Known: {', '.join(fields)}")
        elif item["type"] == "missing":
            parts.append(f"'{where}' is required")
        elif not where:
            parts.append(item["msg"].removeprefix("Value error, "))
        else:
            message = item["msg"][0].lower() + item["msg"][1:]
            parts.append(f"{where}={item['input']!r}: {message}")
    return "run configuration: " + "; ".join(parts)
