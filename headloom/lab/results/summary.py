"""A study's result, computed from what its runs recorded: results.json and results.csv.

Nothing here trains or measures; it can be run again at any time over the same folder and gives the same file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.core.files import write_csv, write_json
from headloom.lab.plan.fairness import differences, flatten
from headloom.lab.plan.places import folder_of
from headloom.lab.results.readings import at_time, pairwise_differences, time_sentence
from headloom.lab.results.remarks import remarks
from headloom.lab.results.statistics import (
    Difference,
    correct,
    listed,
    mean_and_sd,
    paired_difference,
    sentence,
    summary,
)
from headloom.lab.spec.resolved import StudySpec, Variant
from headloom.records.runs import FAILURE, MIXES, PICTURES, RESULT

UNIT = "bits per byte"
Quality = dict[str, dict[int, float]]


def run_state(spec: StudySpec, folder: Path, label: str, seed: int, learning_rate: float) -> dict[str, Any]:
    """A run's state: finished (with its numbers), failed (with the reason), or waiting."""
    name = folder_of(spec, label, seed, learning_rate)
    run: dict[str, Any] = {
        "variant": label,
        "seed": seed,
        "learning_rate": learning_rate,
        "folder": name,
        "status": "waiting",
    }
    failure = FAILURE.read_if_there(folder / name)
    if failure is not None:
        return {**run, "status": "failed", "reason": failure.reason}
    result = RESULT.read_if_there(folder / name)
    if result is None:
        return run
    same = ("perplexity", "selection_bits_per_byte", "train_seconds", "tokens_per_second", "parameters", "weights")
    return {
        **run,
        "status": "finished",
        "bits_per_byte": result.bits_per_byte,
        **{key: getattr(result, key) for key in same},
        "curve": [point.to_dict() for point in result.curve],
        "curve_text": result.curve_text,
        "step_time": result.step_time_seconds,
        "mixes": (folder / name / MIXES).is_file(),
        "pictures": (folder / name / PICTURES).is_file(),
        "quality_text": result.validation_text,
    }


def read_runs(spec: StudySpec, folder: Path) -> list[dict[str, Any]]:
    """The state of every run, seed by seed: of the grid, beyond its edges, and at the rate that was chosen; `chosen`
    says which are.

    Nothing else decides which runs a study has: what lies beyond an edge follows from what the runs before it recorded,
    so a study that is stopped and goes on makes the same ones.
    """
    known = {
        (variant.label, rate, seed): run_state(spec, folder, variant.label, seed, rate)
        for seed in spec.seeds[: spec.grid_seeds]
        for variant in spec.variants
        for rate in spec.learning_rates
    }
    chosen = {}
    for variant in spec.variants:
        label, rates = variant.label, list(spec.learning_rates)
        chosen[label] = best_rate(spec, label, rates, known)
        while (beyond := rate_beyond(spec, rates, chosen[label])) is not None:
            rates = sorted([*rates, beyond])
            for seed in spec.seeds[: spec.grid_seeds]:
                known[label, beyond, seed] = run_state(spec, folder, label, seed, beyond)
            chosen[label] = best_rate(spec, label, rates, known)
    for seed in spec.seeds[spec.grid_seeds :]:
        for variant in spec.variants:
            rate = chosen[variant.label]
            if rate is not None:
                key = variant.label, rate, seed
                known[key] = run_state(spec, folder, variant.label, seed, rate)
    return [{**run, "chosen": run["learning_rate"] == chosen[run["variant"]]} for run in known.values()]


def rate_beyond(spec: StudySpec, rates: Sequence[float], best: float | None) -> float | None:
    """The rate to try next: beyond the edge at which the best of `rates` (ascending) lies, as far from it as its
    neighbour on the other side. None where the best is inside, or not known yet, or enough have been added.
    """
    added = len(rates) - len(spec.learning_rates)
    if best not in (rates[0], rates[-1]) or added >= spec.extend_grid:
        return None
    neighbour = rates[1] if best == rates[0] else rates[-2]
    return float(f"{best * best / neighbour:.6g}")  # as it stands in the run's folder


def is_beyond(spec: StudySpec, seed: int, rate: float) -> bool:
    """Whether this is a run of the grid at a rate that was added to it."""
    return rate not in spec.learning_rates and seed in spec.seeds[: spec.grid_seeds]


def best_rate(
    spec: StudySpec, label: str, rates: Sequence[float], runs: Mapping[tuple[str, float, int], Mapping[str, Any]]
) -> float | None:
    """Of `rates`, the learning rate with the fewest bits per byte on the selection split, over the seeds of the grid.

    None while runs of the grid are missing. A rate at which a seed failed counts only when all of them have failures.
    """
    if not spec.has_grid:
        return spec.learning_rates[0]
    seeds = spec.seeds[: spec.grid_seeds]
    scores: list[tuple[int, float, float]] = []
    for rate in rates:
        mine = [runs[label, rate, seed] for seed in seeds]
        if any(run["status"] == "waiting" for run in mine):
            return None
        found = [run["selection_bits_per_byte"] for run in mine if run["status"] == "finished"]
        mean = math.fsum(found) / len(found) if found else math.inf
        scores.append((len(mine) - len(found), mean, rate))
    return min(scores)[2]


def summarise(
    spec: StudySpec,
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
        planned: label -> what `Plan.costs` says.
        configs: label -> resolved run configuration (of one seed).
        timing: label -> median, low, high, repeats of the interleaved step times, in seconds; may be empty.
    """
    runs = read_runs(spec, folder)
    quality: Quality = {variant.label: {} for variant in spec.variants}
    for run in runs:
        if run["chosen"] and run["status"] == "finished":
            quality[run["variant"]][run["seed"]] = run["bits_per_byte"]
    pairs = [(v.label, v.against) for v in spec.variants if v.against is not None]
    found = correct([paired_difference(quality[label], quality[against]) for label, against in pairs])
    compared = dict(zip(pairs, found, strict=True))
    read = _read_in_time(spec, runs, planned, timing)
    in_time = time_sentence(spec.against, read, UNIT) if spec.budget("time") is None else None
    variants = [_variant(spec, variant, runs, quality, compared, planned, timing, read) for variant in spec.variants]
    done = [run for run in runs if run["status"] == "finished"]
    texts = {key: [run.pop(key) for run in done] for key in ("quality_text", "curve_text", "curve")}
    differing = differences(configs)
    first = flatten(next(iter(configs.values())))
    return {
        "format": 2,
        "hash": study_hash,
        "status": _status(spec, runs),
        "reference": spec.reference,
        "condition": condition(spec),
        "variants": variants,
        "runs": runs,
        "headlines": [*headlines(spec, compared, timing), *([in_time] if in_time else [])],
        "time_summary": in_time or "",
        "summary": summary(compared, unit=UNIT, condition=condition(spec)),
        "notes": [*notes, *remarks(spec, folder, runs, timing, curves=texts["curve_text"], ends=texts["quality_text"])],
        "warnings": _warnings(variants),
        "pairs": [
            pair for group in _groups(spec) for pair in pairwise_differences(group, quality, _steps(planned), timing)
        ],
        "quality_text": next(iter(texts["quality_text"]), ""),
        "curve_text": next(iter(texts["curve_text"]), ""),
        "config_differences": differing,
        "common": {key: value for key, value in first.items() if key not in differing and key != "seed"},
    }


def _variant(
    spec: StudySpec,
    variant: Variant,
    runs: Sequence[Mapping[str, Any]],
    quality: Quality,
    compared: Mapping[tuple[str, str], Difference],
    planned: Mapping[str, Mapping[str, Any]],
    timing: Mapping[str, Mapping[str, Any]],
    read: Mapping[str, Mapping[str, Any]],
) -> dict[str, Any]:
    label, other = variant.label, variant.against or variant.label
    mine = [run for run in runs if run["variant"] == label]
    chosen = next((run["learning_rate"] for run in mine if run["chosen"]), None)
    seeds = spec.seeds[: spec.grid_seeds]
    rates = sorted({run["learning_rate"] for run in mine if run["seed"] in seeds})
    step = timing[label]["median"] if label in timing else None
    difference = compared.get((label, other))
    return {
        "label": label,
        "mechanism": variant.mechanism,
        "options": dict(variant.options),
        "against": variant.against,
        "settings": dict(variant.settings),
        **planned[label],
        "parameters_relative": planned[label]["parameters"] / planned[other]["parameters"] - 1,
        "planned_seconds": None if step is None else step * planned[label]["steps"],
        "step_time": dict(timing[label]) if label in timing else None,
        "step_ratio": _ratio(timing, label, other),
        "learning_rate": chosen,
        "grid": [_grid_point(rate, mine, seeds) for rate in rates] if spec.has_grid else [],
        "grid_added": len(rates) - len(spec.learning_rates),
        "grid_edge": spec.has_grid and chosen in (rates[0], rates[-1]),
        "bits_per_byte": {
            **mean_and_sd(list(quality[label].values())).to_dict(),
            "values": {str(seed): bits for seed, bits in quality[label].items()},
        },
        "difference": difference.to_dict() if difference else None,
        "at_time": read.get(label),
        "failed": [
            {key: run[key] for key in ("seed", "learning_rate", "reason")} for run in mine if run["status"] == "failed"
        ],
    }


def _read_in_time(
    spec: StudySpec,
    runs: Sequence[Mapping[str, Any]],
    planned: Mapping[str, Mapping[str, Any]],
    timing: Mapping[str, Mapping[str, Any]],
) -> dict[str, dict[str, Any]]:
    """As `headloom.lab.results.readings.at_time`, of the runs that are reported."""
    curves: dict[str, dict[int, Any]] = {variant.label: {} for variant in spec.variants}
    for run in runs:
        if run["chosen"] and run["status"] == "finished" and run["curve"]:
            curves[run["variant"]][run["seed"]] = run["curve"]
    return at_time(spec.against, _steps(planned), curves, timing)


def _steps(planned: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    return {label: cost["steps"] for label, cost in planned.items()}


def _groups(spec: StudySpec) -> list[list[str]]:
    """Labels that are compared with one another, directly or through others."""
    found: dict[str, list[str]] = {}
    for variant in spec.variants:
        root = variant.label
        while (other := spec.against[root]) is not None:
            root = other
        found.setdefault(root, []).append(variant.label)
    return list(found.values())


def _grid_point(rate: float, runs: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> dict[str, Any]:
    mine = [run for run in runs if run["learning_rate"] == rate and run["seed"] in seeds]
    values = {str(run["seed"]): run["selection_bits_per_byte"] for run in mine if run["status"] == "finished"}
    return {
        "learning_rate": rate,
        "selection_bits_per_byte": {**mean_and_sd(list(values.values())).to_dict(), "values": values},
        "failed": sum(run["status"] == "failed" for run in mine),
    }


def condition(spec: StudySpec) -> str:
    """What the variants are equal in: "at equal parameters (within 0.5 %) and equal steps"."""
    words = {"flops": "training FLOPs", "cache": "cache bytes"}
    parts = [
        f"equal {words.get(budget.match, budget.match)} (within {budget.tolerance:.1%})".replace("%", " %")
        for budget in spec.budgets
    ]
    turned = {knob for v in spec.variants for b in spec.budgets if spec.target(b, v) for knob in b.knobs_of(v)}
    if "steps" not in turned and "steps" not in spec.axes:
        parts.append("equal steps")
    return "at " + " and ".join(parts) if parts else "with nothing made equal"


def headlines(
    spec: StudySpec,
    compared: Mapping[tuple[str, str], Difference],
    timing: Mapping[str, Mapping[str, Any]],
) -> list[str]:
    """One sentence a variant on quality, the clearest gain first, and one on what the steps cost."""
    order = {"better": 0, "worse": 1, "same": 2, "unknown": 3}
    ranked = sorted(compared, key=lambda pair: (order[compared[pair].verdict], compared[pair].mean or 0.0))
    lines = [
        sentence(label, against, compared[label, against], unit=UNIT, condition=condition(spec))
        for label, against in ranked
    ]
    ratios = [
        f"{label} {ratio:.2f}" for label, against in compared if (ratio := _ratio(timing, label, against)) is not None
    ]
    if ratios:
        references = {against for _, against in compared}
        whose = f"{references.pop()}'s" if len(references) == 1 else "its reference's"
        text = f"A training step takes, in {whose} step times: {', '.join(ratios)}."
        if spec.budget("time") is None:
            text += " The comparison is at equal steps, not at equal time." if "equal steps" in condition(spec) else ""
        lines.append(text)
    return lines


def write_results(folder: Path, results: dict[str, Any]) -> None:
    """results.json, and results.csv with one line a run."""
    write_json(folder / "results.json", results)
    columns = ["variant", "seed", "status", "bits_per_byte", "perplexity", "train_seconds", "step_time", "reason"]
    columns += ["learning_rate", "chosen", "selection_bits_per_byte"]
    write_csv(folder / "results.csv", columns, [[run.get(column, "") for column in columns] for run in results["runs"]])


def _ratio(timing: Mapping[str, Mapping[str, Any]], label: str, against: str) -> float | None:
    if label not in timing or against not in timing:
        return None
    return float(timing[label]["median"] / timing[against]["median"])


def _status(spec: StudySpec, runs: Sequence[Mapping[str, Any]]) -> str:
    states = {run["status"] for run in runs}
    waiting = "waiting" in states or {run["variant"] for run in runs if run["chosen"]} < {
        v.label for v in spec.variants
    }
    if waiting:
        return "partial"
    return "failed" if "failed" in states else "complete"


def _warnings(variants: Sequence[Mapping[str, Any]]) -> list[str]:
    found = []
    for variant in variants:
        if variant["grid_edge"]:
            rates = [point["learning_rate"] for point in variant["grid"]]
            end = "lowest" if variant["learning_rate"] == rates[0] else "highest"
            end += " of its grid" + f" after {variant['grid_added']} more were tried" * bool(variant["grid_added"])
            found.append(
                f"{variant['label']}'s best learning rate, {variant['learning_rate']:g}, is the {end}: a better one "
                "may lie beyond it, so give a wider grid before trusting its place."
            )
    few = {v["label"]: n for v in variants if v["difference"] is not None and 0 < (n := v["difference"]["n"]) < 3}
    for n in sorted(set(few.values())):
        labels = [label for label, pairs in few.items() if pairs == n]
        verb, seeds = "is" if len(labels) == 1 else "are", "one seed" if n == 1 else f"{n} seeds"
        found.append(f"{listed(labels)} {verb} compared over {seeds}: three are usual.")
    return found
