"""study.json: what was asked for last in a study's folder, on which data and machine, and what was measured before the
runs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from headloom.records.files import Fields, Record, RecordFile
from headloom.records.results import BudgetMet, ModelShape, StepTime
from headloom.records.surroundings import Machine

STUDY_YAML, RUNS, SET_ASIDE, REPORT, FIGURES = "study.yaml", "runs", "set_aside", "report.html", "figures"
"""What else is in the folder: the study as it was asked for; the runs; those whose place another run took; the page."""


class ResolvedData(Record):
    """Fingerprints of the text and of its tokens. selection: tokens that learning rates are chosen by."""

    corpus: str
    tokens: str
    selection: int | None


class ResolvedStudy(Record):
    """What the study's hash is taken of: specification, data, every variant's whole configuration, and versions.

    spec: the fields of `headloom.lab.spec.resolved.StudySpec`. configs: label -> a run's configuration with that of
    its attention; whoever reads them compares them as they are.
    """

    spec: dict[str, Any]
    data: ResolvedData
    configs: dict[str, dict[str, Any]]
    versions: dict[str, str]


class StudyData(Record):
    """What the runs are trained and measured on. selection_tokens: None where no learning rate is chosen."""

    title: str
    fingerprint: str
    tokens_fingerprint: str
    train_documents: int
    validation_documents: int
    train_tokens: int
    validation_tokens: int
    selection_tokens: int | None


class MeasuredVariant(Record):
    """A variant's step time, its shape at equal time, and what the time budget came to (None: it has none)."""

    timing: StepTime
    shape: ModelShape
    match: BudgetMet | None


class Manifest(Record):
    """The content of study.json.

    Attributes:
        kind, name, title, question, hash: of the study. command: the command line that makes it.
        spec: the fields of `headloom.lab.spec.resolved.StudySpec`, which reads them, and the reference's `steps`.
        training_text, timing_text: how variants are trained and timed, in sentences.
        timing, frozen, time_matches: label -> step time, shape and time budget of the variants as they are now.
        measured: the same of every variant that was ever in this folder, by what they follow from.
        started: when the study was first asked for.
    """

    kind: Literal["compare", "study"]
    name: str
    title: str
    question: str
    hash: str
    spec: dict[str, Any]
    resolved: ResolvedStudy
    data: StudyData
    versions: dict[str, str]
    machine: Machine
    engine: str
    command: str
    training_text: str
    timing_text: str
    timing: dict[str, StepTime]
    frozen: dict[str, ModelShape]
    time_matches: dict[str, BudgetMet]
    measured: dict[str, MeasuredVariant]
    started: str


class _View(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class AskedBudget(_View):
    """What is made equal, by turning what."""

    match: str
    knobs: tuple[str, ...]
    tolerance: float


class AskedBackbone(_View):
    """The Hugging Face config around whose model every variant is built."""

    model_type: str


class StudyAsked(_View):
    """What a report shows of a specification. backbone: None for our own Llama."""

    size: str
    seeds: tuple[int, ...]
    learning_rates: tuple[float, ...]
    budgets: tuple[AskedBudget, ...]
    threads: int
    backbone: AskedBackbone | None = None


def _with_backbone(fields: Fields) -> Fields:
    """Format 2 said by single fields of its specification what format 3 has in a Hugging Face config, or not at all."""
    resolved = fields.get("resolved")
    for spec in (fields.get("spec"), resolved.get("spec") if isinstance(resolved, dict) else None):
        if isinstance(spec, dict):
            for name in ("rope_scaling", "norm_eps"):
                spec.pop(name, None)
            spec.setdefault("backbone", None)
    return fields


STUDY = RecordFile(
    "study.json",
    Manifest,
    format=3,
    upgrades={2: _with_backbone},
    missing="give the folder that headloom compare or headloom study run wrote",
)
