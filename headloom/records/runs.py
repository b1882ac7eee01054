"""A run's folder: what it holds, and the files that can be read at any moment.

config.json     the resolved configuration           metrics.jsonl   one JSON object a line (headloom.records.metrics)
result.json     there if and only if the run is complete             failure.json   why it stopped, if it did
mixes.npz       the learned mixes, and pictures.npz what a report shows of the weights (headloom.records.arrays)
run.yaml        the run as `headloom train` was asked for it         log.txt        what the run's process said
model/          the trained model, where it was asked for            tracking/      what --track writes
checkpoints/    while it runs: what it goes on from after a kill. A checkpoint is step-<n>/, complete where it has
                complete.json

Format 1 of these files did not say its number at first: a file that says none has it.
"""

from __future__ import annotations

from typing import Any

from headloom.records.files import Record, RecordFile
from headloom.records.surroundings import Machine

METRICS, MIXES, PICTURES, LOG, RUN_YAML = "metrics.jsonl", "mixes.npz", "pictures.npz", "log.txt", "run.yaml"
MODEL, TRACKING, CHECKPOINTS = "model", "tracking", "checkpoints"


class CurvePoint(Record):
    """Held-out quality after `step` steps and `seconds` of training, on the part of the text read along the way."""

    step: int
    seconds: float
    bits_per_byte: float


class RunNumbers(Record):
    """What a complete run measured.

    Attributes:
        bits_per_byte, validation_loss (nats per token), perplexity, validation_tokens, validation_bytes: at the end,
        on the validation split.
        validation_text: the rules of that measurement in one line.
        notes: what people should know about the data before they trust a number; mostly empty.
        curve: held-out quality along the way and at the end; empty where none was asked for. curve_text: its rules.
        selection_bits_per_byte: on the split that learning rates are chosen by, None where there is none.
        weights: SHA-256 of the trained weights.
        parameters: trainable numbers, tied ones once. train_loss: of the last step. tokens: predicted in training.
        train_seconds: training alone, without validation, records and callbacks. eval_seconds: of the one at the end.
        step_time_seconds: median wall time of a step without the first `warm_steps`, with the quartiles beside it.
        tokens_per_second: predicted tokens of a step / step_time_seconds.
        score_paths: how often each score path ran ("fused", "blocks").
        no_decay_parameters: numbers without weight decay (norms, biases, mixes).
    """

    name: str
    seed: int
    steps: int
    bits_per_byte: float
    validation_loss: float
    perplexity: float | None
    validation_tokens: int
    validation_bytes: int
    validation_text: str
    notes: tuple[str, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    curve_text: str = ""
    selection_bits_per_byte: float | None
    weights: str
    parameters: int
    no_decay_parameters: int
    train_loss: float
    tokens: int
    train_seconds: float
    eval_seconds: float
    step_time_seconds: float
    step_time_low: float
    step_time_high: float
    warm_steps: int
    tokens_per_second: float
    score_paths: dict[str, int]
    fingerprint: str


class RunResult(RunNumbers):
    """The outcome of a complete run (result.json): its numbers, and the versions and the machine they come from."""

    versions: dict[str, str]
    machine: Machine

    @property
    def numbers(self) -> RunNumbers:
        """The numbers alone."""
        return RunNumbers(**{name: getattr(self, name) for name in RunNumbers.model_fields})


class RunFailure(Record):
    """Why a run stopped (failure.json); step: at which, where it had begun."""

    name: str
    seed: int
    step: int | None = None
    reason: str


class CheckpointMark(Record):
    """What makes a checkpoint complete (complete.json).

    Attributes:
        step: after which it was made. score_paths: how often each had run by then. sharded: whether FSDP wrote it.
    """

    step: int
    score_paths: dict[str, int]
    sharded: bool = False


# Its fields are those of `headloom.train.config.RunConfig` (or FineTuneConfig), which writes them. Whoever reads them
# asks whether two runs are the same one, and for that they are compared as they are.
CONFIG = RecordFile("config.json", dict[str, Any], format=1, unstated=1)
UNFINISHED = "the run is not complete, so train it, or see failure.json"
RESULT = RecordFile("result.json", RunResult, format=1, unstated=1, missing=UNFINISHED)
FAILURE = RecordFile("failure.json", RunFailure, format=1, unstated=1)
MARK = RecordFile("complete.json", CheckpointMark, format=1, unstated=1)
