"""A study's result, computed from what its runs recorded: results.json and results.csv.

Nothing here trains or measures; it can be run again at any time over the same folder and gives the same file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.lab.budget import TOLERANCE
from headloom.lab.fairness import differences, flatten
from headloom.lab.folder import read_json, slug, write_csv, write_json
from headloom.lab.spec import CompareSpec
from headloom.lab.statistics import Difference, correct, paired_difference, sentence, spread

UNIT = "bits per byte"
CONDITION = f"at equal parameters (within {TOLERANCE:.1%}) and equal steps".replace("%", " %")


def run_folder(label: str, seed: int) -> str:
    """A run's folder inside the study's: runs/<variant>-seed<k>."""
    return f"runs/{slug(label)}-seed{seed}"


def read_run(folder: Path, label: str, seed: int) -> dict[str, Any]:
    """A run's state: finished (with its numbers), failed (with the reason), or waiting."""
    name = run_folder(label, seed)
    run: dict[str, Any] = {"variant": label, "seed": seed, "folder": name, "status": "waiting"}
    failure = read_json(folder / name / "failure.json")
    if failure is not None:
        return {**run, "status": "failed", "reason": str(failure.get("reason", "unknown"))}
    result = read_json(folder / name / "result.json")
    if result is None:
        return run
    bits = result.get("bits_per_byte")
    if not isinstance(bits, int | float) or not math.isfinite(bits):
        return {**run, "status": "failed", "reason": f"bits per byte is {bits}, not a finite number"}
    return {
        **run,
        "status": "finished",
        "bits_per_byte": bits,
        "perplexity": result["perplexity"],
        "train_seconds": result["train_seconds"],
        "step_time": result["step_time_seconds"],
        "tokens_per_second": result["tokens_per_second"],
        "parameters": result["parameters"],
        "quality_text": result["validation_text"],
    }


def summarise(
    spec: CompareSpec,
    folder: Path,
    *,
    study_hash: str,
    planned: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, Mapping[str, Any]],
    timing: Mapping[str, Mapping[str, Any]],
    notes: Sequence[str],
) -> dict[str, Any]:
    """The content of results.json.

    Args:
        planned: label -> intermediate_size, parameters, attention_flops_per_token, cache_bytes_per_token,
            cache_constant_bytes.
        configs: label -> resolved run configuration (of one seed).
        timing: label -> median, low, high, repeats of the interleaved step times, in seconds; may be empty.
    """
    runs = [read_run(folder, variant.label, seed) for seed in spec.seeds for variant in spec.variants]
    quality = {
        variant.label: {
            run["seed"]: run["bits_per_byte"]
            for run in runs
            if run["variant"] == variant.label and run["status"] == "finished"
        }
        for variant in spec.variants
    }
    others = [variant.label for variant in spec.variants if variant.label != spec.reference]
    compared = dict(
        zip(
            others,
            correct([paired_difference(quality[label], quality[spec.reference]) for label in others]),
            strict=True,
        )
    )
    variants = []
    for variant in spec.variants:
        label = variant.label
        mine = [run for run in runs if run["variant"] == label]
        variants.append(
            {
                "label": label,
                "mechanism": variant.mechanism,
                "options": dict(variant.options),
                **planned[label],
                "parameters_relative": planned[label]["parameters"] / planned[spec.reference]["parameters"] - 1,
                "step_time": dict(timing[label]) if label in timing else None,
                "step_ratio": _ratio(timing, label, spec.reference),
                "bits_per_byte": {
                    **spread(list(quality[label].values())).to_dict(),
                    "values": {str(seed): bits for seed, bits in quality[label].items()},
                },
                "difference": compared[label].to_dict() if label in compared else None,
                "failed": [{"seed": run["seed"], "reason": run["reason"]} for run in mine if run["status"] == "failed"],
            }
        )
    texts = [run.pop("quality_text") for run in runs if run["status"] == "finished"]
    found = differences(configs)
    first = flatten(next(iter(configs.values())))
    return {
        "format": 1,
        "hash": study_hash,
        "status": _status(runs),
        "reference": spec.reference,
        "variants": variants,
        "runs": runs,
        "headlines": headlines(spec, compared, timing),
        "notes": [*notes, *_failure_notes(runs)],
        "quality_text": texts[0] if texts else "",
        "config_differences": found,
        "common": {key: value for key, value in first.items() if key not in found and key != "seed"},
    }


def headlines(
    spec: CompareSpec, compared: Mapping[str, Difference], timing: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    """One sentence a variant on quality, the clearest gain first, and one on what the steps cost."""
    order = {"better": 0, "worse": 1, "same": 2, "unknown": 3}
    ranked = sorted(compared, key=lambda label: (order[compared[label].verdict], compared[label].mean or 0.0))
    lines = [sentence(label, spec.reference, compared[label], unit=UNIT, condition=CONDITION) for label in ranked]
    ratios = [
        f"{label} {ratio:.2f}"
        for label in (variant.label for variant in spec.variants)
        if label != spec.reference and (ratio := _ratio(timing, label, spec.reference)) is not None
    ]
    if ratios:
        lines.append(
            f"A training step takes, in {spec.reference}'s step times: {', '.join(ratios)}. "
            "The comparison is at equal steps, not at equal time."
        )
    return lines


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """results.json, and results.csv with one line a run."""
    write_json(folder / "results.json", results)
    columns = ("variant", "seed", "status", "bits_per_byte", "perplexity", "train_seconds", "step_time", "reason")
    write_csv(folder / "results.csv", columns, [[run.get(column, "") for column in columns] for run in results["runs"]])


def _ratio(timing: Mapping[str, Mapping[str, Any]], label: str, reference: str) -> float | None:
    if label not in timing or reference not in timing:
        return None
    return float(timing[label]["median"] / timing[reference]["median"])


def _status(runs: Sequence[Mapping[str, Any]]) -> str:
    states = {run["status"] for run in runs}
    if "waiting" in states:
        return "partial"
    return "failed" if "failed" in states else "complete"


def _failure_notes(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    failed = [run for run in runs if run["status"] == "failed"]
    if not failed:
        return []
    return [f"{len(failed)} of {len(runs)} runs failed; a difference is taken over the seeds that finished in both."]
