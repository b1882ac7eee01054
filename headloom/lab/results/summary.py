"""A study's result, computed from what its runs recorded: the content of results.json.

Nothing here trains or measures; it can be run again at any time over the same folder and gives the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from headloom.lab.plan.fairness import differences, flatten
from headloom.lab.results.readings import at_time, pairwise_differences, time_sentence
from headloom.lab.results.remarks import remarks
from headloom.lab.results.runs import KnownRun, RunReader
from headloom.lab.results.statistics import correct, listed, paired_difference, quality, sentence, summary
from headloom.lab.spec.resolved import StudySpec, Variant
from headloom.records.results import (
    AtTime,
    Difference,
    FailedSeed,
    GridPoint,
    Results,
    StepTime,
    StudyRun,
    VariantResult,
)

UNIT = "bits per byte"
Qualities = dict[str, dict[int, float]]


def summarise(
    spec: StudySpec,
    folder: Path,
    reader: RunReader,
    *,
    study_hash: str,
    planned: Mapping[str, Mapping[str, Any]],
    configs: Mapping[str, Mapping[str, Any]],
    timing: Mapping[str, StepTime],
    notes: Sequence[str],
) -> Results:
    """What the study found so far.

    Args:
        reader: of the runs in `folder`.
        planned: label -> what `Plan.costs` says.
        configs: label -> resolved run configuration (of one seed).
        timing: label -> interleaved step times; may be empty.
    """
    known = reader.all()
    runs = [run.record(chosen=chosen) for run, chosen in known]
    reported = [run for run, chosen in known if chosen and run.result]
    qualities: Qualities = {variant.label: {} for variant in spec.variants}
    curves: dict[str, dict[int, Any]] = {variant.label: {} for variant in spec.variants}
    for run in reported:
        assert run.result is not None
        qualities[run.variant][run.seed] = run.result.bits_per_byte
        if run.result.curve:
            curves[run.variant][run.seed] = run.result.curve
    pairs = [(v.label, v.against) for v in spec.variants if v.against is not None]
    found = correct([paired_difference(qualities[label], qualities[against]) for label, against in pairs])
    compared = dict(zip(pairs, found, strict=True))
    steps = {label: cost["steps"] for label, cost in planned.items()}
    read = at_time(spec.against, steps, curves, timing)
    in_time = time_sentence(spec.against, read, UNIT) if spec.budget("time") is None else None
    variants = [_variant(spec, variant, known, qualities, compared, planned, timing, read) for variant in spec.variants]
    done = [run.result for run, _ in known if run.result]
    curve_texts, quality_texts = [run.curve_text for run in done], [run.validation_text for run in done]
    differing = differences(configs)
    first = flatten(next(iter(configs.values())))
    return Results(
        hash=study_hash,
        status=_status(spec, runs),
        reference=spec.reference,
        condition=condition(spec),
        variants=tuple(variants),
        runs=tuple(runs),
        headlines=(*headlines(spec, compared, timing), *([in_time] if in_time else [])),
        time_summary=in_time or "",
        summary=summary(compared, unit=UNIT, condition=condition(spec)),
        notes=(*notes, *remarks(spec, folder, runs, timing, curves=curve_texts, ends=quality_texts)),
        warnings=tuple(_warnings(variants)),
        pairs=tuple(pair for group in _groups(spec) for pair in pairwise_differences(group, qualities, steps, timing)),
        quality_text=next(iter(quality_texts), ""),
        curve_text=next(iter(curve_texts), ""),
        config_differences=differing,
        common={key: value for key, value in first.items() if key not in differing and key != "seed"},
    )


def _variant(
    spec: StudySpec,
    variant: Variant,
    runs: Sequence[tuple[KnownRun, bool]],
    qualities: Qualities,
    compared: Mapping[tuple[str, str], Difference],
    planned: Mapping[str, Mapping[str, Any]],
    timing: Mapping[str, StepTime],
    read: Mapping[str, AtTime],
) -> VariantResult:
    label, other = variant.label, variant.against or variant.label
    mine = [run for run, _ in runs if run.variant == label]
    chosen = next((run.learning_rate for run, chosen in runs if chosen and run.variant == label), None)
    seeds = spec.seeds[: spec.grid_seeds]
    rates = sorted({run.learning_rate for run in mine if run.seed in seeds})
    step = timing[label].median if label in timing else None
    return VariantResult(
        label=label,
        mechanism=variant.mechanism,
        options=dict(variant.options),
        against=variant.against,
        settings=dict(variant.settings),
        **planned[label],
        parameters_relative=planned[label]["parameters"] / planned[other]["parameters"] - 1,
        planned_seconds=None if step is None else step * planned[label]["steps"],
        step_time=timing.get(label),
        step_ratio=_ratio(timing, label, other),
        learning_rate=chosen,
        grid=tuple(_grid_point(rate, mine, seeds) for rate in rates) if spec.has_grid else (),
        grid_added=len(rates) - len(spec.learning_rates),
        grid_edge=spec.has_grid and chosen in (rates[0], rates[-1]),
        bits_per_byte=quality(qualities[label]),
        difference=compared.get((label, other)),
        at_time=read.get(label),
        failed=tuple(
            FailedSeed(seed=run.seed, learning_rate=run.learning_rate, reason=run.failure.reason)
            for run in mine
            if run.failure
        ),
    )


def _groups(spec: StudySpec) -> list[list[str]]:
    """Labels that are compared with one another, directly or through others."""
    found: dict[str, list[str]] = {}
    for variant in spec.variants:
        root = variant.label
        while (other := spec.against[root]) is not None:
            root = other
        found.setdefault(root, []).append(variant.label)
    return list(found.values())


def _grid_point(rate: float, runs: Sequence[KnownRun], seeds: Sequence[int]) -> GridPoint:
    mine = [run for run in runs if run.learning_rate == rate and run.seed in seeds]
    values = {run.seed: bits for run in mine if run.result and (bits := run.result.selection_bits_per_byte) is not None}
    failed = sum(run.status == "failed" for run in mine)
    return GridPoint(learning_rate=rate, selection_bits_per_byte=quality(values), failed=failed)


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
    timing: Mapping[str, StepTime],
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


def _ratio(timing: Mapping[str, StepTime], label: str, against: str) -> float | None:
    if label not in timing or against not in timing:
        return None
    return timing[label].median / timing[against].median


def _status(spec: StudySpec, runs: Sequence[StudyRun]) -> Literal["partial", "failed", "complete"]:
    states = {run.status for run in runs}
    waiting = "waiting" in states or {run.variant for run in runs if run.chosen} < {v.label for v in spec.variants}
    if waiting:
        return "partial"
    return "failed" if "failed" in states else "complete"


def _warnings(variants: Sequence[VariantResult]) -> list[str]:
    found = []
    for variant in variants:
        if variant.grid_edge:
            rates = [point.learning_rate for point in variant.grid]
            end = "lowest" if variant.learning_rate == rates[0] else "highest"
            end += " of its grid" + f" after {variant.grid_added} more were tried" * bool(variant.grid_added)
            found.append(
                f"{variant.label}'s best learning rate, {variant.learning_rate:g}, is the {end}: a better one "
                "may lie beyond it, so give a wider grid before trusting its place."
            )
    few = {v.label: n for v in variants if v.difference is not None and 0 < (n := v.difference.n) < 3}
    for n in sorted(set(few.values())):
        labels = [label for label, pairs in few.items() if pairs == n]
        verb, seeds = "is" if len(labels) == 1 else "are", "one seed" if n == 1 else f"{n} seeds"
        found.append(f"{listed(labels)} {verb} compared over {seeds}: three are usual.")
    return found
