"""What stands around the figures: the banner, failed runs, every run, machine, versions and data."""

from __future__ import annotations

from collections.abc import Mapping

from headloom.records.manifest import AskedBudget
from headloom.records.reading import StudyRecords
from headloom.records.results import FailedRun, FinishedRun, StepTime
from headloom.records.runs import FAILURE
from headloom.report.tables import Row, duration, filled, setting_text

REASON = 400  # letters of a failure's reason; the whole is in the run's folder
FAILURES = 40


def title(study: StudyRecords) -> str:
    """The study's own title, or its variants and data."""
    if study.manifest.title and study.manifest.kind != "compare":
        return study.manifest.title
    labels = study.labels
    named = ", ".join(labels) if len(labels) <= 6 else f"{', '.join(labels[:4])} and {len(labels) - 4} more"
    return f"{named}: compared"


def kicker(study: StudyRecords) -> str:
    """The line above the title."""
    return f"Headloom study: {study.manifest.name}" if study.manifest.kind == "study" else "Headloom comparison"


def banner(study: StudyRecords) -> str:
    """How far the study is, where it is not whole."""
    runs = study.results.runs
    failed = sum(run.status == "failed" for run in runs)
    waiting = sum(run.status == "waiting" for run in runs)
    parts = []
    if waiting:
        parts.append(f"{waiting} of {len(runs)} runs have not been made yet; the same command goes on with them.")
    if failed:
        parts.append(f"{failed} of {len(runs)} runs failed: see below the tables for which, and why.")
    return " ".join(parts)


def failures(study: StudyRecords) -> tuple[list[dict[str, str]], int]:
    """The first failed runs with their reasons, and how many more there are."""
    failed = [run for run in study.results.runs if isinstance(run, FailedRun)]
    shown = [
        {
            "variant": run.variant,
            "run": f"seed {run.seed}, rate {run.learning_rate:g}",
            "reason": _cut(run.reason, run.folder),
        }
        for run in failed[:FAILURES]
    ]
    return shown, len(failed) - len(shown)


def _cut(reason: str, folder: str) -> str:
    return reason if len(reason) <= REASON else f"{reason[:REASON]} ... (the whole is in {folder}/{FAILURE.name})"


def runs(study: StudyRecords) -> tuple[list[str], list[Row]]:
    """Every run of the study, those of a grid too."""
    names = [
        "variant",
        "seed",
        "learning rate",
        "state",
        "bits per byte",
        "perplexity per token",
        "training seconds",
        "weights (SHA-256)",
    ]
    lines = []
    for run in study.results.runs:
        done = run if isinstance(run, FinishedRun) else None
        perplexity = done and done.perplexity
        cells = (
            run.variant,
            str(run.seed),
            f"{run.learning_rate:g}",
            run.status + ("" if run.chosen else " (grid only)"),
            f"{done.bits_per_byte:.5f}" if done else "-",
            "-" if perplexity is None else f"{perplexity:.4f}",
            f"{done.train_seconds:.1f}" if done else "-",
            done.weights[:12] if done else "-",
        )
        lines.append(Row(run.variant, cells, "", ""))
    return filled(names, lines)


def in_short(study: StudyRecords) -> list[tuple[str, str]]:
    """What was run, for the first screen: text, model, training, machine, date."""
    record, asked = study.manifest, study.asked
    first = next((variant for variant in study.variants if variant.against is None), study.variants[0])
    shape = first.shape
    whose = f" {asked.backbone.model_type} config," if asked.backbone else ""
    model = (
        f"{asked.size}:{whose} {shape.num_layers} layers, width {shape.hidden_size}, {shape.num_heads} heads, "
        f"{first.parameters:,} parameters ({first.label})"
    )
    alike = len({variant.steps for variant in study.variants}) == 1
    steps = f"{first.steps:,} steps" + ("" if alike else f" ({first.label})")
    share = _share(first.tokens_trained / record.data.train_tokens)
    threads = f"a run on {asked.threads} thread{'s' * (asked.threads > 1)}"
    return [
        ("Text", record.data.title),
        ("Model", model),
        (
            "Training",
            f"{steps} of {shape.batch_size} sequences of {shape.tokens} tokens, {share}, {len(asked.seeds)} seeds",
        ),
        ("Machine", f"{record.machine.name}, {record.machine.cores} cores, {threads}"),
        ("Begun", record.started[:10]),
    ]


def _share(passes: float) -> str:
    """How much of the training text a run sees.

    >>> _share(0.0387), _share(2.5)
    ('3.9 % of the training text', '2.5 times the training text')
    """
    return f"{passes:.3g} times the training text" if passes >= 1 else f"{100 * passes:.2g} % of the training text"


def how_read(study: StudyRecords) -> list[str]:
    """How the numbers of the first table come about that are no means of what runs recorded."""
    variants, found = study.variants, []
    if any(variant.at_time for variant in variants):
        found.append(
            "At the reference's time: each variant's held-out curve, read where its steps times its measured step time "
            "reach the reference's whole training time, on the straight line between the two evaluations around it."
        )
    if any(variant.difference and variant.difference.more_seeds for variant in variants):
        found.append(
            "More seeds, an estimate: if mean m and standard deviation s of the paired differences stay what they are, "
            "the fewest pairs N with |m| >= (t(1 - 0.05/2k, N-1) + t(0.8, N-1)) s / sqrt(N), k being the number of "
            "comparisons, would show the difference with probability 0.8; those there are already are taken off."
        )
    return found


def facts(study: StudyRecords) -> list[tuple[str, str]]:
    """How it was measured, on what, with what."""
    record, results, asked, data = study.manifest, study.results, study.asked, study.manifest.data
    documents = f"{data.train_documents:,} training and {data.validation_documents:,} validation documents"
    tokens = f"{data.train_tokens:,} training and {data.validation_tokens:,} validation tokens"
    if data.selection_tokens is not None:
        tokens += f", {data.selection_tokens:,} selection tokens that choose the learning rate and are not reported"
    found = [
        ("Compared", results.condition),
        ("Quality", results.quality_text or "no run has finished yet"),
        ("Training", record.training_text),
        ("Seeds", ", ".join(map(str, asked.seeds))),
        ("Learning rates", ", ".join(f"{rate:g}" for rate in asked.learning_rates)),
        ("Budgets", "; ".join(map(_budget, asked.budgets))),
        ("Along the way", results.curve_text),
        ("Step time", record.timing_text),
        ("Steps measured", _timing(record.timing)),
        ("Data", f"{documents}; {tokens}"),
        ("Data fingerprint", data.fingerprint),
        ("Tokens fingerprint", data.tokens_fingerprint),
        ("Machine", ", ".join(f"{name}: {setting_text(value)}" for name, value in record.machine.to_dict().items())),
        ("Engine", record.engine),
        ("Versions", ", ".join(f"{name} {value}" for name, value in record.versions.items())),
        ("Study", f"{record.hash}, begun {record.started}"),
    ]
    return [(name, text) for name, text in found if text]


def _budget(budget: AskedBudget) -> str:
    within = f"within {budget.tolerance:.1%}".replace("%", " %")
    return f"equal {budget.match} {within} by {', '.join(budget.knobs)}"


def _timing(timing: Mapping[str, StepTime]) -> str:
    return "; ".join(
        f"{label} {duration(row.median)} ({duration(row.low)} to {duration(row.high)})" for label, row in timing.items()
    )
