"""A fine-tuning's folder: a model with and without a graft, trained the same way.

config.json          what was asked, and the data's fingerprint: another question is refused
result.json          everything measured, rewritten as each run ends
<arm>/before.json    bits per byte before training, parameters, and what the graft changed
<arm>/seed-<n>/      one run (headloom.records.runs), with the tuned model in model/

Format 1 of these files did not say its number at first: a file that says none has it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headloom.records.files import Record, RecordFile
from headloom.records.runs import RunNumbers
from headloom.records.surroundings import Machine


class TuningAsked(Record):
    """What was asked: the data's fingerprint, and every run's configuration (`FineTuneConfig`)."""

    fingerprint: str
    runs: tuple[dict[str, Any], ...]


class BeforeTuning(Record):
    """A model as it is before it is trained.

    Attributes:
        parameters: all of them. graft: what the graft changed, in words, and difference: the largest of its outputs to
        the model's it came from; None without a graft.
        bits_per_byte: of the held-out text, and text: the rules of that measurement.
    """

    parameters: int
    graft: str | None
    difference: float | None
    bits_per_byte: float
    text: str


class TunedArm(Record):
    """A model and its finished runs. graft: what was put into it before training (`GraftSpec`), None for nothing."""

    model: str
    graft: dict[str, Any] | None
    before: BeforeTuning
    runs: tuple[RunNumbers, ...]


class TuningResult(Record):
    """Everything that was measured so far.

    Attributes:
        data: what the text is called. notes: on the text. fingerprint: of the text as tokens.
        settings: the fields of `FineTuneConfig` that all runs share. complete: whether every run is finished.
        arms: by name, those with a finished run. versions, machine: of the process that wrote this last.
    """

    data: str
    notes: tuple[str, ...]
    fingerprint: str
    settings: dict[str, Any]
    complete: bool
    arms: dict[str, TunedArm]
    versions: dict[str, str]
    machine: Machine


ASKED = RecordFile("config.json", TuningAsked, format=1, unstated=1)
BEFORE = RecordFile("before.json", BeforeTuning, format=1, unstated=1)
RESULT = RecordFile("result.json", TuningResult, format=1, unstated=1)


def run_folder(out: Path, arm: str, seed: int) -> Path:
    """Where the run of an arm with a seed is."""
    return out / arm / f"seed-{seed}"
