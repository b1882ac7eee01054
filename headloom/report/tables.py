"""Tables as text cells: the terminal's, and the page's three (what was found; how sure that is; what it cost)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headloom.records.reading import StudyRecords
from headloom.records.results import AtTime, Difference, FailedSeed, VariantResult

BEYOND = ("better", "worse")
MOST = 1000  # pairs beyond which an estimate of them says no more than that it is beyond
WORDS = {
    "better": "better",
    "worse": "worse",
    "same": "not distinguishable",
    "unknown": "not known",
    "reference": "reference",
}


@dataclass(frozen=True)
class Row:
    """One variant. `verdict` is better, worse, same, unknown, or reference; `problem` says what failed."""

    label: str
    cells: tuple[str, ...]
    verdict: str
    problem: str


def columns(reference: str) -> tuple[str, ...]:
    """The headings, in the order of `Row.cells`."""
    return (
        "variant",
        "options",
        "parameters",
        "attention FLOPs per token",
        "cache bytes per token",
        "step time",
        "bits per byte",
        f"difference to {reference}",
        f"bits per byte at {reference}'s time",
        "more seeds to settle it",
    )


DIFFERENCE = 7
"""The place of the verdict among the columns."""


def rows(study: StudyRecords) -> list[Row]:
    """The terminal's table, one row a variant in the study's order."""
    places = _places(study.variants)
    return [_row(variant, places) for variant in study.variants]


def found_table(study: StudyRecords) -> tuple[list[str], list[Row]]:
    """The page's first table: quality, the paired difference, what a step takes, quality at equal time, and how many
    more seeds would settle it. Columns that no variant fills are left out."""
    variants = study.variants
    against = _references(study)
    whose = next(iter(against)) if len(against) == 1 else "its reference"
    names = [
        "variant",
        "bits per byte",
        f"difference to {whose}",
        "verdict",
        f"step time, in {whose}'s",
        f"bits per byte at {whose}'s time",
        "difference there",
        "more seeds to settle it",
    ]
    places = _places(variants)
    lines = []
    for variant in variants:
        verdict, _ = _difference(variant, places)
        other = variant.against
        word = WORDS[verdict] + (f" than {other}" if len(against) > 1 and verdict in BEYOND else "")
        read, ratio = variant.at_time, variant.step_ratio
        cells = (
            variant.label,
            _quality(variant, places),
            _signed(variant.difference, places),
            word,
            "-" if ratio is None else f"{1.0 if other is None else ratio:.2f}",
            _mean(read, places),
            _signed(read.difference if read else None, places),
            _more_seeds(variant),
        )
        lines.append(Row(variant.label, cells, verdict, ""))
    return filled(names, lines)


def interval_table(study: StudyRecords) -> tuple[list[str], list[Row]]:
    """The page's second table: how sure the differences are."""
    names = ["variant", "95 % interval (t)", "95 % interval (bootstrap)", "p (Holm)", "effect / seed sd"]
    places = _places(study.variants)
    lines = []
    for variant in study.variants:
        row = variant.difference
        if row is not None:
            cells = (
                variant.label,
                _interval(row.low, row.high, places),
                _interval(row.bootstrap_low, row.bootstrap_high, places),
                _p(row.p, row.p_holm),
                "-" if row.effect is None else f"{row.effect:+.2g}",
            )
            lines.append(Row(variant.label, cells, "", ""))
    return filled(names, lines)


def _references(study: StudyRecords) -> set[str]:
    return {name for variant in study.variants if (name := variant.against)}


def _signed(difference: Difference | None, places: int) -> str:
    """A paired difference with half its interval."""
    if difference is None or difference.mean is None:
        return "-"
    half = difference.half_width
    return f"{difference.mean:+.{places}f}" + ("" if half is None else f" ± {half:.{places}f}")


def _mean(read: AtTime | None, places: int) -> str:
    mean = read.bits_per_byte.mean if read else None
    return "-" if mean is None else f"{mean:.{places}f}"


def _in_time(read: AtTime | None, places: int) -> str:
    difference = _signed(read.difference if read else None, places)
    return _mean(read, places) + ("" if difference == "-" else f" ({difference})")


def _more_seeds(variant: VariantResult) -> str:
    """The estimate in words: "-" where it is settled or there is nothing to settle."""
    difference = variant.difference
    if not difference or difference.verdict in BEYOND:
        return "-"
    more = difference.more_seeds
    if more is None:
        return "not known" if difference.n < 2 else "-"
    if more + difference.n >= MOST:
        return f"over {MOST - difference.n - 1:,}"
    digits = max(0, len(str(more)) - 2)
    return f"about {round(more, -digits):,}"


def cost_table(study: StudyRecords) -> tuple[list[str], list[Row]]:
    """The page's third table: what every variant is made of and takes. Columns that no variant fills are left out."""
    names = [
        "variant",
        "parameters",
        "layers, width, heads",
        "attention FLOPs per token",
        "training FLOPs, visible / all pairs",
        "cache bytes, token / context",
        "step time",
        "steps / tokens",
        "planned time",
        "learning rate",
        "options",
    ]
    lines = []
    for variant in study.variants:
        shape = variant.shape
        cells = (
            variant.label,
            _parameters(variant),
            f"{shape.num_layers} x {shape.hidden_size} x {shape.num_heads}",
            short(variant.attention_flops_per_token),
            f"{short(variant.training_flops_exact)} / {short(variant.training_flops_full)}",
            f"{short(variant.cache_bytes_per_token)} / {short(variant.cache_bytes)}",
            _step(variant),
            f"{short(variant.steps)} / {short(variant.tokens_trained)}",
            "-" if variant.planned_seconds is None else duration(variant.planned_seconds),
            "-" if variant.learning_rate is None else f"{variant.learning_rate:g}" + " (edge)" * variant.grid_edge,
            _options(variant, but=variant.label),
        )
        lines.append(Row(variant.label, cells, "", ""))
    return filled(names, lines)


def filled(names: Sequence[str], lines: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """The table without the columns in which no row says anything."""
    kept = [i for i in range(len(names)) if any(row.cells[i] not in ("-", "not measured") for row in lines)]
    rest = [Row(row.label, tuple(row.cells[i] for i in kept), row.verdict, row.problem) for row in lines]
    return [names[i] for i in kept], rest


def _interval(low: float | None, high: float | None, places: int) -> str:
    return "-" if low is None or high is None else f"{low:+.{places}f} to {high:+.{places}f}"


def _p(p: float | None, corrected: float | None) -> str:
    value = corrected if corrected is not None else p
    return "-" if value is None else "< 0.0001" if value < 0.0001 else f"{value:.2g}"


def _row(variant: VariantResult, places: int) -> Row:
    failed = _failed(variant)
    problem = "; ".join(f"seed {run.seed} failed: {run.reason}" for run in failed)
    verdict, compared = _difference(variant, places)
    cells = (
        variant.label,
        _options(variant),
        _parameters(variant),
        short(variant.attention_flops_per_token),
        f"{variant.cache_bytes_per_token:,}",
        _step(variant),
        _quality(variant, places),
        compared,
        _in_time(variant.at_time, places),
        _more_seeds(variant),
    )
    return Row(variant.label, cells, verdict, problem)


def _options(variant: VariantResult, but: str = "") -> str:
    """Options and settings, without those that the text `but` names already."""
    texts = [f"{name}={setting_text(value)}" for name, value in (variant.options | variant.settings).items()]
    return ", ".join(text for text in texts if text not in but) or "-"


def _parameters(variant: VariantResult) -> str:
    relative = f" ({variant.parameters_relative:+.2%})" if variant.against is not None else ""
    return f"{variant.parameters:,}{relative}"


def _failed(variant: VariantResult) -> list[FailedSeed]:
    """The failed runs at the reported learning rate."""
    return [run for run in variant.failed if run.learning_rate == variant.learning_rate]


def _quality(variant: VariantResult, places: int) -> str:
    bits = variant.bits_per_byte
    failed = _failed(variant)
    if failed and not bits.n:
        return "failed"
    if bits.mean is None:
        return "no finished run"
    spread = " (one seed)" if bits.sd is None else f" ± {bits.sd:.{places}f}"
    of = f", {bits.n} of {bits.n + len(failed)} seeds" if failed else ""
    return f"{bits.mean:.{places}f}{spread}{of}"


def _difference(variant: VariantResult, places: int) -> tuple[str, str]:
    if variant.against is None:
        return "reference", "reference"
    row = variant.difference
    if row is None or row.mean is None:
        return "unknown", "not known"
    if row.half_width is None:
        return "unknown", f"{row.mean:+.{places}f} (one seed: no interval)"
    verdict = row.verdict
    return verdict, f"{row.mean:+.{places}f} ± {row.half_width:.{places}f}, {WORDS[verdict]}"


def _step(variant: VariantResult) -> str:
    timing = variant.step_time
    if not timing:
        return "not measured"
    ratio = variant.step_ratio
    times = f" ({ratio:.2f} x)" if ratio is not None and variant.against is not None else ""
    return duration(timing.median) + times


def _places(variants: Sequence[VariantResult]) -> int:
    """Digits that show two figures of the smallest spread or half width in the table: 3 to 5."""
    sizes = [variant.bits_per_byte.sd for variant in variants]
    sizes += [variant.difference.half_width for variant in variants if variant.difference]
    real = [size for size in sizes if size]
    return min(5, max(3, 1 - math.floor(math.log10(min(real))))) if real else 4


def short(number: float) -> str:
    """1234567 -> '1.235 M'.

    >>> short(663_552)
    '663.6 k'
    """
    for limit, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.4g} {letter}"
    return f"{number:.4g}"


def duration(value: float) -> str:
    """0.1524 -> '152 ms'."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def setting_text(value: Any) -> str:
    """A config value as the command line writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
