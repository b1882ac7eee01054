"""The comparison's table as text cells, shared by the page and the terminal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from headloom.report.records import Study


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
    )


def rows(study: Study) -> list[Row]:
    """The table, one row a variant in the study's order."""
    results = study.results
    places = _places(results["variants"])
    return [_row(variant, results["reference"], places) for variant in results["variants"]]


def _row(variant: dict[str, Any], reference: str, places: int) -> Row:
    label = variant["label"]
    options = ", ".join(f"{name}={show(value)}" for name, value in variant["options"].items())
    bits = variant["bits_per_byte"]
    if bits["mean"] is None:
        quality = "no finished run"
    elif bits["sd"] is None:
        quality = f"{bits['mean']:.{places}f} (one seed)"
    else:
        quality = f"{bits['mean']:.{places}f} ± {bits['sd']:.{places}f}"
    failed = variant["failed"]
    problem = "; ".join(f"seed {run['seed']} failed: {run['reason']}" for run in failed)
    if failed and bits["n"]:
        quality += f", {bits['n']} of {bits['n'] + len(failed)} seeds"
    elif failed:
        quality = "failed"
    verdict, compared = _difference(variant, reference, places)
    cells = (
        label,
        options or "-",
        f"{variant['parameters']:,}" + (f" ({variant['parameters_relative']:+.2%})" if label != reference else ""),
        short(variant["attention_flops_per_token"]),
        f"{variant['cache_bytes_per_token']:,}",
        _step(variant, reference),
        quality,
        compared,
    )
    return Row(label, cells, verdict, problem)


def _difference(variant: dict[str, Any], reference: str, places: int) -> tuple[str, str]:
    if variant["label"] == reference:
        return "reference", "reference"
    found = variant["difference"]
    if found is None or found["mean"] is None:
        return "unknown", "not known"
    if found["half_width"] is None:
        return "unknown", f"{found['mean']:+.{places}f} (one seed: no interval)"
    words = {"better": "better", "worse": "worse", "same": "not distinguishable"}
    return found[
        "verdict"
    ], f"{found['mean']:+.{places}f} ± {found['half_width']:.{places}f}, {words[found['verdict']]}"


def _step(variant: dict[str, Any], reference: str) -> str:
    timing = variant["step_time"]
    if not timing:
        return "not measured"
    ratio = variant.get("step_ratio")
    times = f" ({ratio:.2f} x)" if ratio is not None and variant["label"] != reference else ""
    return seconds(timing["median"]) + times


def _places(variants: list[dict[str, Any]]) -> int:
    """Digits that show two figures of the smallest spread or half width in the table: 3 to 5."""
    sizes = [variant["bits_per_byte"]["sd"] for variant in variants]
    sizes += [variant["difference"]["half_width"] for variant in variants if variant["difference"]]
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


def seconds(value: float) -> str:
    """0.1524 -> '152 ms'."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def show(value: Any) -> str:
    """A config value as the command line writes it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
