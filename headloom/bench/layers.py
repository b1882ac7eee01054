"""Speed and memory of attention layers: forward, and forward with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from headloom.bench import against as users
from headloom.bench import core
from headloom.bench.asked import MODES, Named, Sizes, check_counts, check_layers
from headloom.bench.memory import peak_bytes
from headloom.bench.setting import Peak, Setting
from headloom.bench.speed import interleaved, measured_seconds
from headloom.bench.subjects import (
    FACTOR,
    Subject,
    configs_of,
    inputs,
    module_call,
    plain,
    subject,
)
from headloom.ops.scores import paths

"""What of a layer is timed: all of it, or its core alone (`headloom.bench.core`)."""
COMPILED = " compiled"
"""Added to the label of what runs through torch.compile."""


def speed(
    variants: Sequence[Named],
    sizes: Sizes,
    setting: Setting,
    *,
    tokens: Sequence[int],
    batch_sizes: Sequence[int],
    modes: Sequence[str] = MODES,
    against: str | None = None,
    plainly: bool = False,
    compile: str | None = None,
    peak: Peak | None = None,
    part: str = "layer",
) -> list[dict[str, Any]]:
    """Rows of times, in the order tokens, batch sizes, modes, variants; the first variant is what ratios are over.

    Args:
        against: the user's module (`headloom.bench.against`), timed in turns with the variants.
        plainly: also every variant's straightforward form (`headloom.bench.plain`), with its weights.
        compile: a backend of torch.compile ("inductor"): everything also runs compiled, in the same turns. The time of
            the first compiled call stands apart.
        peak: what utilisation is of; it is measured before every point.
        part: "layer", or "scores": its core alone, in eager mode, and the FLOPs of that.
    """
    check_layers(part, against=against, plainly=plainly, compiled=compile is not None)
    alone = part == "scores"
    rows: list[dict[str, Any]] = []
    for T, B, subjects, x_BTD in _points(variants, sizes, setting, tokens, batch_sizes, against, plainly):
        differences = _differences(subjects, x_BTD)
        if alone:
            subjects = [core.scores_of(each, T) for each in subjects]
        if peak is not None:
            peak.measure()
        for mode in modes:
            setting.say(f"{mode}{' of the scores' if alone else ''}, {T:,} tokens x {B}")
            calls: dict[str, Callable[[], object]] = {}
            ran: dict[str, dict[str, Any]] = {}
            for each in subjects:
                each.module.train(mode != "forward")
                timed = core.call(each, x_BTD, mode) if alone else module_call(each.module, x_BTD, mode)
                calls[each.label] = timed
                with paths() as counted:  # eager: a compiled call would count nothing
                    calls[each.label]()
                ran[each.label] = {"paths": dict(counted), "compiled": False}
                if compile is not None:
                    setting.say(f"compiling {each.label}")
                    name = each.label + COMPILED
                    calls[name] = module_call(torch.compile(each.module, backend=compile, dynamic=False), x_BTD, mode)
                    ran[name] = {**ran[each.label], "compiled": True, **first_compiled_call(calls[name])}
            timings = interleaved(calls, repeats=setting.repeats, warmup=setting.warmup, device=setting.device)
            torch.compiler.reset()
            done = len(rows)
            for each in subjects:
                for name in (each.label, each.label + COMPILED):
                    if name in timings:
                        share = each.layers / subjects[0].layers
                        row = {
                            **_about(each, mode, x_BTD),
                            "part": part,
                            "seconds": timings[name].per(each.layers).to_dict(),
                            "ratio": timings[name].over(timings[subjects[0].label]).per(share).spread(),
                            "ratio_to_own": timings[name].over(timings[each.form_of or each.label]).spread(),
                            **{f"flops_{kind}": _flops(each, kind, mode, B) for kind in ("full", "exact")},
                            **ran[name],
                        }
                        rows.append(row | ({"differences": differences[name]} if name in differences else {}))
            use_of_peak(rows, peak)
            setting.keep(rows[done:])
    return rows


def memory(
    variants: Sequence[Named],
    sizes: Sizes,
    setting: Setting,
    *,
    tokens: Sequence[int],
    batch_sizes: Sequence[int],
    modes: Sequence[str] = MODES,
    against: str | None = None,
    plainly: bool = False,
) -> list[dict[str, Any]]:
    """Rows of peak bytes (`headloom.bench.memory`), above weights and input; a schedule's are of its whole period."""
    rows: list[dict[str, Any]] = []
    for T, B, subjects, x_BTD in _points(variants, sizes, setting, tokens, batch_sizes, against, plainly):
        for mode in modes:
            setting.say(f"memory of {mode}, {T:,} tokens x {B}")
            peaks: dict[str, int] = {}
            done = len(rows)
            for each in subjects:
                each.module.train(mode != "forward")
                once = module_call(each.module, x_BTD, mode)
                once()  # tables and the like that are kept
                found = peaks[each.label] = peak_bytes(once, setting.device)
                rows.append(
                    {
                        **_about(each, mode, x_BTD),
                        "peak_bytes": found,
                        "ratio": found / peaks[subjects[0].label],
                        "ratio_to_own": found / peaks[each.form_of or each.label],
                        "input_bytes": x_BTD.numel() * x_BTD.element_size(),
                        "weight_bytes": sum(p.numel() * p.element_size() for p in each.module.parameters()),
                    }
                )
            setting.keep(rows[done:])
    return rows


def _about(each: Subject, mode: str, x_BTD: torch.Tensor) -> dict[str, Any]:
    """What a row is of."""
    B, T, _ = x_BTD.shape
    point = {"mode": mode, "tokens": T, "batch_size": B}
    return {"variant": each.label, **point, "layers": each.layers, "form_of": each.form_of}


def use_of_peak(rows: Sequence[dict[str, Any]], peak: Peak | None) -> None:
    """Add the utilisation in both conventions, of the peak so far."""
    if peak is None:
        return
    for row in rows:
        for name in ("full", "exact"):
            row[f"utilisation_{name}"] = peak.utilisation(row[f"flops_{name}"], row["seconds"]["median"])


def _points(
    variants: Sequence[Named],
    sizes: Sizes,
    setting: Setting,
    tokens: Sequence[int],
    batch_sizes: Sequence[int],
    against: str | None,
    plainly: bool,
) -> Iterator[tuple[int, int, list[Subject], torch.Tensor]]:
    """(T, B, subjects, x) of every point; wrong sizes are refused before the first."""
    check_counts({"tokens": tokens, "batch-size": batch_sizes})
    for T in tokens:
        for named in variants:
            configs_of(named, sizes, T)
    for T in tokens:
        subjects = [subject(named, sizes, T, setting) for named in variants]
        if plainly:
            subjects += [plain(each) for each in subjects]
        if against is not None:
            subjects.append(users.build_theirs(against, sizes, setting))
        for B in batch_sizes:
            yield T, B, subjects, inputs(B, T, sizes.hidden_size, setting)


def _differences(subjects: Sequence[Subject], x_BTD: torch.Tensor) -> dict[str, list[dict[str, Any]]]:
    """How outputs differ, by label: of another form from its variant, of a user's module from every variant."""
    variants = {each.label: each for each in subjects if each.form_of is None and each.flops is not None}
    found: dict[str, list[dict[str, Any]]] = {}
    for each in subjects:
        if each.label not in variants:
            users.output_of(each, x_BTD)
            mine = variants.values() if each.form_of is None else [variants[each.form_of]]
            found[each.label] = [users.compare_outputs(other, each, x_BTD) for other in mine]
    return found


def first_compiled_call(first_call: Callable[[], object]) -> dict[str, Any]:
    """The seconds of a call that compiles, and why the graph broke, if it did."""
    from torch._dynamo import config
    from torch._dynamo.utils import counters

    counters.clear()
    # all subjects run through one piece of code: each is one more compilation of it, and none may fall back to eager
    with config.patch(recompile_limit=1000, fail_on_recompile_limit_hit=True):
        took = measured_seconds(first_call)
    return {"compile_seconds": took, "graph_breaks": dict(counters["graph_break"])}


def _flops(each: Subject, convention: str, mode: str, batch: int) -> float | None:
    return None if each.flops is None else each.flops[convention] * FACTOR[mode] * batch
