"""results.json and results.csv: what a study found, computed again from its runs after each one.

Qualities are bits per byte. A difference is variant minus what it is compared with, seed by seed: below zero is better.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from headloom.core.files import write_text
from headloom.records.files import Record, RecordFile

Number = int | float
Verdict = Literal["better", "worse", "same", "unknown"]
CSV = "results.csv"


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (None with fewer than two values) over n seeds."""

    n: int
    mean: float | None
    sd: float | None


@dataclass(frozen=True)
class Quality(Spread):
    """The same with every seed's value."""

    values: dict[int, float]


@dataclass(frozen=True)
class Difference:
    """A paired difference, variant minus reference: below zero is better where less is better.

    `sd` is the differences' own; `half_width`, `low`, `high` bound the 95 % t interval: None with fewer than two
    pairs, as `p` is. `p_holm`, `verdict` and `more_seeds` (0: settled) are filled by
    `headloom.lab.results.statistics.correct`.
    """

    n: int
    mean: float | None
    half_width: float | None = None
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    verdict: Verdict = "unknown"
    bootstrap_low: float | None = None
    bootstrap_high: float | None = None
    effect: float | None = None
    sd: float | None = None
    more_seeds: int | None = None


class ModelShape(Record):
    """The sizes of a variant's model, and the length of its training; `tokens` is the context."""

    num_layers: int
    hidden_size: int
    num_heads: int
    head_dim: int
    intermediate_size: int
    tokens: int
    batch_size: int
    steps: int


class BudgetMet(Record):
    """What a budget came to for one variant. knobs: what was turned. relative: count / target - 1."""

    match: str
    knobs: tuple[str, ...]
    target: Number
    count: Number
    relative: float


class StepTime(Record):
    """Seconds of a training step: the median with its quartiles, and every repetition. Repetitions were taken in turns,
    so sample i of one variant belongs to sample i of another. beside: of a variant that joined the study later, the
    one it was measured with; its times are then given in that one's time from before."""

    median: float
    low: float
    high: float
    repeats: int
    samples: tuple[float, ...]
    beside: str | None = None

    @model_serializer(mode="wrap")
    def _known(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in usual(self).items() if name != "beside" or value is not None}


class AtTime(Record):
    """A variant read at the end of its reference's training time.

    Attributes:
        seconds: that time. step: where the variant stands then. share: of its own run; below 1 its learning rate has
        not come down to the schedule's end, above 1 its run was over before. difference: to the reference there.
    """

    seconds: float
    step: float
    share: float
    bits_per_byte: Quality
    difference: Difference | None


class GridPoint(Record):
    """A learning rate that was tried, on the split that learning rates are chosen by. failed: runs that failed."""

    learning_rate: float
    selection_bits_per_byte: Quality
    failed: int


class FailedSeed(Record):
    """A run of a variant that failed."""

    seed: int
    learning_rate: float
    reason: str


class VariantResult(Record):
    """What was found of one variant.

    Attributes:
        against: the label it is compared with; None for a reference. settings: the axes in which it is set apart.
        training_flops_...: forward and backward of the whole model, per predicted token and of the run; exact: visible
        pairs, full: all pairs. attention_flops_per_token: forward, all layers. cache_...: all layers, float32.
        matches: what each budget came to. parameters_relative: over the reference's, less 1.
        planned_seconds: steps times the measured step. step_ratio: that step over the reference's.
        learning_rate: the reported one, None while it is not chosen. grid: every rate tried. grid_added: how many lie
        beyond the study's own. grid_edge: whether the chosen one is the lowest or highest.
    """

    label: str
    mechanism: str
    options: dict[str, Any]
    against: str | None
    settings: dict[str, int]
    shape: ModelShape
    intermediate_size: int
    parameters: int
    training_flops_per_token_exact: Number
    training_flops_per_token_full: Number
    training_flops_exact: Number
    training_flops_full: Number
    attention_flops_per_token: Number
    cache_bytes_per_token: Number
    cache_constant_bytes: Number
    cache_bytes: Number
    steps: int
    tokens_trained: int
    matches: tuple[BudgetMet, ...]
    parameters_relative: float
    planned_seconds: float | None
    step_time: StepTime | None
    step_ratio: float | None
    learning_rate: float | None
    grid: tuple[GridPoint, ...]
    grid_added: int
    grid_edge: bool
    bits_per_byte: Quality
    difference: Difference | None
    at_time: AtTime | None
    failed: tuple[FailedSeed, ...]


class _OneRun(Record):
    variant: str
    seed: int
    learning_rate: float
    folder: str


class WaitingRun(_OneRun):
    """A run that has not been made yet. folder: inside the study's. chosen: whether its learning rate is the one that
    is reported (all of them are where the study has no grid)."""

    status: Literal["waiting"] = "waiting"
    chosen: bool


class FailedRun(_OneRun):
    """A run that failed, and why."""

    status: Literal["failed"] = "failed"
    reason: str
    chosen: bool


class FinishedRun(_OneRun):
    """A run with its result. weights: their SHA-256. step_time: seconds, the median of its own. mixes, pictures:
    whether it left these files (headloom.records.arrays)."""

    status: Literal["finished"] = "finished"
    bits_per_byte: float
    perplexity: float | None
    selection_bits_per_byte: float | None
    train_seconds: float
    tokens_per_second: float
    parameters: int
    weights: str
    step_time: float
    mixes: bool
    pictures: bool
    chosen: bool


StudyRun = WaitingRun | FailedRun | FinishedRun


class Between(Record):
    """A paired difference over n seeds with its 95 % interval; None: not known."""

    n: int
    mean: float | None
    low: float | None
    high: float | None


class TimeRatio(Record):
    """One training time over another, with the 95 % interval of the median; None: steps were not taken in turns."""

    ratio: float
    low: float | None
    high: float | None


class Pair(Record):
    """What tells two variants apart: `variant` minus `other` in bits, and the one's time over the other's (None: not
    measured)."""

    variant: str
    other: str
    bits: Between
    time: TimeRatio | None


class Results(Record):
    """What a study found so far.

    Attributes:
        hash: of the study. reference: the label that the others are compared with, unless they say another.
        condition: what the variants are equal in. variants: in the study's order. runs: seed by seed.
        headlines: the findings in sentences. summary: all differences in one, and time_summary: those at equal time.
        notes: what has to be known beside the numbers. warnings: what makes them doubtful.
        pairs: of variants that are compared with one another. quality_text, curve_text: the rules of the measurement
        at the end and along the way; empty before the first run. config_differences: key -> label -> value.
        common: what all runs share.
    """

    hash: str
    status: Literal["partial", "failed", "complete"]
    reference: str
    condition: str
    variants: tuple[VariantResult, ...]
    runs: tuple[Annotated[StudyRun, Field(discriminator="status")], ...]
    headlines: tuple[str, ...]
    time_summary: str
    summary: str
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    pairs: tuple[Pair, ...]
    quality_text: str
    curve_text: str
    config_differences: dict[str, dict[str, Any]]
    common: dict[str, Any]


RESULTS = RecordFile("results.json", Results, format=2, missing="give the folder of a study that headloom has run")
_COLUMNS = [
    *("variant", "seed", "status", "bits_per_byte", "perplexity", "train_seconds", "step_time", "reason"),
    *("learning_rate", "chosen", "selection_bits_per_byte"),
]


def write_results(folder: Path, results: Results) -> None:
    """Write results.json, and results.csv with one line a run."""
    RESULTS.write(folder, results)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, _COLUMNS, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(run.to_dict() for run in results.runs)
    write_text(folder / CSV, stream.getvalue())
