"""What stands around the figures: the banner, failed runs, every run, machine, versions and data."""

from __future__ import annotations

from typing import Any

from headloom.report.records import Study
from headloom.report.tables import Row, filled, seconds, show

REASON = 400  # letters of a failure's reason; the whole is in the run's folder
FAILURES = 40


def title(study: Study) -> str:
    """The study's own title, or its variants and data."""
    given = study.study.get("title")
    if given and study.study.get("kind") != "compare":
        return str(given)
    labels = study.labels
    named = ", ".join(labels) if len(labels) <= 6 else f"{', '.join(labels[:4])} and {len(labels) - 4} more"
    return f"{named}: compared"


def kicker(study: Study) -> str:
    name = study.study.get("name")
    return f"Headloom study: {name}" if study.study.get("kind") == "study" and name else "Headloom comparison"


def banner(study: Study) -> str:
    """How far the study is, where it is not whole."""
    runs = study.results["runs"]
    failed = sum(run["status"] == "failed" for run in runs)
    waiting = sum(run["status"] == "waiting" for run in runs)
    parts = []
    if waiting:
        parts.append(f"{waiting} of {len(runs)} runs have not been made yet; the same command goes on with them.")
    if failed:
        parts.append(f"{failed} of {len(runs)} runs failed: see below the tables for which, and why.")
    return " ".join(parts)


def failures(study: Study) -> tuple[list[dict[str, str]], int]:
    """The first failed runs with their reasons, and how many more there are."""
    failed = [run for run in study.results["runs"] if run["status"] == "failed"]
    shown = [
        {
            "variant": run["variant"],
            "run": f"seed {run['seed']}" + (f", rate {_rate(run)}" if run.get("learning_rate") is not None else ""),
            "reason": _cut(str(run.get("reason") or "not told"), run["folder"]),
        }
        for run in failed[:FAILURES]
    ]
    return shown, len(failed) - len(shown)


def _cut(reason: str, folder: str) -> str:
    return reason if len(reason) <= REASON else f"{reason[:REASON]} ... (the whole is in {folder}/failure.json)"


def _rate(run: dict[str, Any]) -> str:
    rate = run.get("learning_rate")
    return "-" if rate is None else f"{rate:g}"


def runs(study: Study) -> tuple[list[str], list[Row]]:
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
    for run in study.results["runs"]:
        done = run["status"] == "finished"
        perplexity = run.get("perplexity") if done else None
        cells = (
            run["variant"],
            str(run["seed"]),
            _rate(run),
            run["status"] + ("" if run.get("chosen", True) else " (grid only)"),
            f"{run['bits_per_byte']:.5f}" if done else "-",
            "-" if perplexity is None else f"{perplexity:.4f}",
            f"{run['train_seconds']:.1f}" if done else "-",
            str(run.get("weights") or "-")[:12],
        )
        lines.append(Row(run["variant"], cells, "", ""))
    return filled(names, lines)


def in_short(study: Study) -> list[tuple[str, str]]:
    """What was run, for the first screen: text, model, training, machine, date."""
    record, spec = study.study, study.study["spec"]
    data, machine = record["data"], record["machine"]
    first = next((v for v in study.results["variants"] if study.against(v) is None), study.results["variants"][0])
    shape, common = first.get("shape") or {}, study.results["common"]
    size = [f"{spec['size']}:" if spec.get("size") else ""]
    if shape:
        size += [f"{spec['backbone']['model_type']} config," if spec.get("backbone") else ""]
        size += [f"{shape['num_layers']} layers, width {shape['hidden_size']}, {shape['num_heads']} heads,"]
    size += [f"{first['parameters']:,} parameters ({first['label']})"]
    steps = first.get("steps") or common.get("steps") or spec.get("steps")
    alike = len({v.get("steps") for v in study.results["variants"]}) == 1
    training = [f"{steps:,} steps" + ("" if alike else f" ({first['label']})")] if steps else []
    batch, tokens = shape.get("batch_size"), shape.get("tokens")
    training += [f"of {batch} sequences of {tokens} tokens" if batch and tokens else ""]
    trained, seeds = first.get("tokens_trained"), spec.get("seeds")
    share = _share(trained / data["train_tokens"]) if trained else ""
    parts = [" ".join(filter(None, training)), share, f"{len(seeds)} seeds" if seeds else ""]
    threads = spec.get("threads")
    cores = f"{machine['cores']} cores" + (f", a run on {threads} thread{'s' * (threads > 1)}" if threads else "")
    found = [
        ("Text", data["title"]),
        ("Model", " ".join(filter(None, size))),
        ("Training", ", ".join(filter(None, parts))),
        ("Machine", f"{machine.get('accelerator') or machine['processor']}, {cores}"),
        ("Begun", record["started"][:10]),
    ]
    return [(name, text) for name, text in found if text]


def _share(passes: float) -> str:
    """How much of the training text a run sees.

    >>> _share(0.0387), _share(2.5)
    ('3.9 % of the training text', '2.5 times the training text')
    """
    return f"{passes:.3g} times the training text" if passes >= 1 else f"{100 * passes:.2g} % of the training text"


def how_read(study: Study) -> list[str]:
    """How the numbers of the first table come about that are no means of what runs recorded."""
    variants, found = study.results["variants"], []
    if any(variant.get("at_time") for variant in variants):
        found.append(
            "At the reference's time: each variant's held-out curve, read where its steps times its measured step time "
            "reach the reference's whole training time, on the straight line between the two evaluations around it."
        )
    if any((variant.get("difference") or {}).get("more_seeds") for variant in variants):
        found.append(
            "More seeds, an estimate: if mean m and standard deviation s of the paired differences stay what they are, "
            "the fewest pairs N with |m| >= (t(1 - 0.05/2k, N-1) + t(0.8, N-1)) s / sqrt(N), k being the number of "
            "comparisons, would show the difference with probability 0.8; those there are already are taken off."
        )
    return found


def facts(study: Study) -> list[tuple[str, str]]:
    """How it was measured, on what, with what."""
    record, results = study.study, study.results
    data, spec = record["data"], record["spec"]
    documents = f"{data['train_documents']:,} training and {data['validation_documents']:,} validation documents"
    tokens = f"{data['train_tokens']:,} training and {data['validation_tokens']:,} validation tokens"
    selection = data.get("selection_tokens")
    if selection is not None:
        tokens += f", {selection:,} selection tokens that choose the learning rate and are not reported"
    curve = results.get("curve_text")
    found = [
        ("Compared", results.get("condition")),
        ("Quality", results["quality_text"] or "no run has finished yet"),
        ("Training", record["training_text"]),
        ("Seeds", ", ".join(map(str, spec.get("seeds") or []))),
        ("Learning rates", ", ".join(f"{rate:g}" for rate in spec.get("learning_rates") or [])),
        ("Budgets", "; ".join(_budget(budget) for budget in spec.get("budgets") or [])),
        ("Along the way", curve),
        ("Step time", record["timing_text"]),
        ("Steps measured", _timing(record.get("timing") or {})),
        ("Data", f"{documents}; {tokens}"),
        ("Data fingerprint", data["fingerprint"]),
        ("Tokens fingerprint", data.get("tokens_fingerprint")),
        ("Machine", ", ".join(f"{name}: {show(value)}" for name, value in record["machine"].items())),
        ("Engine", record.get("engine")),
        ("Versions", ", ".join(f"{name} {value}" for name, value in record["versions"].items())),
        ("Study", f"{record['hash']}, begun {record['started']}"),
    ]
    return [(name, str(text)) for name, text in found if text]


def _budget(budget: dict[str, Any]) -> str:
    knobs = ", ".join(map(str, budget.get("knobs") or []))
    tolerance = budget.get("tolerance")
    within = "" if tolerance is None else f" within {tolerance:.1%}".replace("%", " %")
    return f"equal {budget.get('match')}{within}" + (f" by {knobs}" if knobs else "")


def _timing(timing: dict[str, Any]) -> str:
    return "; ".join(
        f"{label} {seconds(row['median'])} ({seconds(row['low'])} to {seconds(row['high'])})"
        for label, row in timing.items()
    )
