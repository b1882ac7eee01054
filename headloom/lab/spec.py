"""What a comparison is, resolved: nothing is left to a default that could change later."""

from __future__ import annotations

import hashlib
import json
import shlex
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headloom.core.errors import HeadloomError
from headloom.lab.sizes import Size
from headloom.lab.variants import Variant, defaults

Count = Annotated[int, Field(ge=1)]
LONGEST_STEPS = 10_000_000


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class VariantSpec(_Strict):
    """A mechanism or a schedule of layers, its options as given, and the label it goes by."""

    label: str = Field(min_length=1)
    mechanism: str
    options: dict[str, Any] = {}


class CompareSpec(_Strict):
    """A comparison at equal parameters and steps.

    The reference variant has the size's own feed-forward width; the others' is turned until they count the same.
    `tokens` is the context, `batch_size` sequences a step, `seeds` the seeds every variant runs with.
    """

    variants: tuple[VariantSpec, ...] = Field(min_length=2)
    reference: str
    size: str
    num_layers: Count
    hidden_size: Count
    num_heads: Count
    head_dim: Count
    intermediate_size: Count
    tie_embeddings: bool
    rope_theta: float = Field(gt=0)
    tokens: int = Field(ge=2)
    batch_size: Count
    steps: int = Field(ge=1, le=LONGEST_STEPS)
    learning_rate: float = Field(gt=0, allow_inf_nan=False)
    seeds: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    data: str = Field(min_length=1)
    tokenizer: str = Field(min_length=1)
    validation_bytes: Count
    threads: Count

    def variant(self, label: str) -> VariantSpec:
        return next(variant for variant in self.variants if variant.label == label)

    @property
    def warmup_steps(self) -> int:
        """A tenth of the steps, at most 1000."""
        return min(1000, self.steps // 10)

    @property
    def command(self) -> str:
        """The command line that makes this comparison, with nothing left to a default."""
        variants = (Variant(variant.mechanism, variant.options).text for variant in self.variants)
        arguments = {
            "--variants": ",".join(variants),
            "--size": self.size,
            "--steps": self.steps,
            "--seeds": len(self.seeds),
            "--data": self.data,
            "--tokenizer": self.tokenizer,
            "--tokens": self.tokens,
            "--batch-size": self.batch_size,
            "--learning-rate": f"{self.learning_rate:g}"
            if float(f"{self.learning_rate:g}") == self.learning_rate
            else repr(self.learning_rate),
            "--threads": self.threads,
        }
        words = [word for name, value in arguments.items() for word in (name, str(value))]
        return shlex.join(["headloom", "compare", *words])


def make_spec(
    variants: list[Variant],
    size: Size,
    *,
    seeds: int,
    data: str,
    tokenizer: str,
    threads: int,
    steps: int | None = None,
    tokens: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
) -> CompareSpec:
    """The resolved comparison; None means the size's own value. A value out of bounds is a HeadloomError."""
    if type(seeds) is not int or not 1 <= seeds <= 1000:
        raise HeadloomError(f"seeds must be a number of seeds from 1 to 1000, not {seeds!r}")
    labels = [variant.label for variant in variants]
    reference = defaults().reference if defaults().reference in labels else labels[0]
    try:
        return CompareSpec(
            variants=tuple(
                VariantSpec(label=variant.label, mechanism=variant.mechanism, options=dict(variant.options))
                for variant in variants
            ),
            reference=reference,
            size=size.name,
            num_layers=size.num_layers,
            hidden_size=size.hidden_size,
            num_heads=size.num_heads,
            head_dim=size.head_dim,
            intermediate_size=size.intermediate_size,
            tie_embeddings=size.tie_embeddings,
            rope_theta=size.rope_theta,
            tokens=size.tokens if tokens is None else tokens,
            batch_size=size.batch_size if batch_size is None else batch_size,
            steps=size.steps if steps is None else steps,
            learning_rate=size.learning_rate if learning_rate is None else learning_rate,
            seeds=tuple(range(seeds)),
            data=data,
            tokenizer=tokenizer,
            validation_bytes=size.validation_bytes,
            threads=threads,
        )
    except ValidationError as error:
        raise HeadloomError(one_line(error)) from None


def one_line(error: ValidationError) -> str:
    """Pydantic's complaint as one line: the field, what is allowed, what came."""
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"]) or "the study"
    message = first["msg"][:1].lower() + first["msg"][1:]
    return f"{where}: {message}, not {first['input']!r}"


def identity(*parts: Any) -> str:
    """Twelve hexadecimal digits that are equal for equal JSON values."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:12]
