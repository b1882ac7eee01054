"""What is read between variants from the records of their runs: quality at equal training time, and what tells any two
of them apart.

Times are steps times the measured step, never the clock of a run, which knows what else its machine did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise
from typing import Any

from headloom.lab.results.statistics import (
    Difference,
    correct,
    listed,
    mean_and_sd,
    median_interval,
    paired_difference,
    summary,
)

Timing = Mapping[str, Mapping[str, Any]]
FINISHED = 0.99  # a share of its steps from which a run's schedule is as good as finished


def at_step(curve: Sequence[Mapping[str, Any]], step: float) -> float | None:
    """Bits per byte after `step` steps: on the straight line between the two evaluations around it, and the last one's
    after the end. None before the first.

    >>> at_step([{"step": 10, "bits_per_byte": 4.0}, {"step": 20, "bits_per_byte": 3.0}], 12.5)
    3.75
    """
    if not curve or step < curve[0]["step"]:
        return None
    for before, after in pairwise(curve):
        if step < after["step"]:
            share = (step - before["step"]) / (after["step"] - before["step"])
            return float(before["bits_per_byte"] + share * (after["bits_per_byte"] - before["bits_per_byte"]))
    return float(curve[-1]["bits_per_byte"])


def at_time(
    against: Mapping[str, str | None], steps: Mapping[str, int], curves: Mapping[str, Mapping[int, Any]], timing: Timing
) -> dict[str, dict[str, Any]]:
    """Label -> what it reaches in the whole training time of the variant it is compared with.

    Args:
        against: label -> whom it is compared with; None: a reference, which is read at its own end.
        steps: label -> steps of its runs. curves: label -> seed -> points of (step, bits_per_byte).

    A result holds `seconds`, the `step` a variant stands at then, the `share` of its run that is (below 1 its learning
    rate has not come down to the schedule's end; above 1 its run was over before), bits per byte over seeds, and the
    paired difference, corrected over all of them. Labels without a curve or a measured step are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    for label, other in against.items():
        other = other or label
        if label not in timing or other not in timing or not curves.get(label):
            continue
        seconds = steps[other] * timing[other]["median"]
        step = seconds / timing[label]["median"] if other != label else float(steps[label])
        read = {seed: at_step(curve, step) for seed, curve in curves[label].items()}
        values = {seed: bits for seed, bits in read.items() if bits is not None}
        found[label] = {"seconds": seconds, "step": step, "share": step / steps[label], "values": values}
    pairs = {label: other for label, other in against.items() if label in found and other in found}
    differences = correct([paired_difference(found[a]["values"], found[b]["values"]) for a, b in pairs.items()])
    compared = dict(zip(pairs, differences, strict=True))
    for label, row in found.items():
        values = row.pop("values")
        quality = {
            **mean_and_sd(list(values.values())).to_dict(),
            "values": {str(s): bits for s, bits in values.items()},
        }
        difference = compared.get(label)
        row |= {"bits_per_byte": quality, "difference": difference.to_dict() if difference else None}
    return found


def time_sentence(against: Mapping[str, str | None], read: Mapping[str, Mapping[str, Any]], unit: str) -> str | None:
    """What `at_time` found, as one may quote it, with what there is to say against it."""
    compared = {
        (label, other): Difference(**row["difference"])
        for label, row in read.items()
        if (other := against[label]) is not None and row["difference"] is not None
    }
    if not compared:
        return None
    whose = {other: read[other]["seconds"] for _, other in compared}
    when = "the reference's training time"
    if len(whose) == 1:
        other, seconds = next(iter(whose.items()))
        when = f"{other}'s training time ({seconds:.3g} s)"
    early = [label for label, _ in compared if not read[label]["bits_per_byte"]["n"]]
    reached = {pair: difference for pair, difference in compared.items() if pair[0] not in early}
    text = summary(reached, unit=unit, condition=f"at {when}")
    if early:
        text += f" In {when}, {listed(early)} did not reach the first evaluation."
    unfinished = [label for label, _ in reached if read[label]["share"] < FINISHED]
    if unfinished:
        text += (
            f" There the learning rate of {listed(unfinished)} has not come down to the end of its schedule: a run "
            "planned for that time would do a little better."
        )
    return text.strip()


def pairwise_differences(
    labels: Sequence[str], quality: Mapping[str, Mapping[int, float]], steps: Mapping[str, int], timing: Timing
) -> list[dict[str, Any]]:
    """What tells any two variants apart: `variant` minus `other` in bits per byte, and the one's training time over
    the other's, each with its 95 % interval (`low` and `high` None: not known)."""
    found = []
    for label, other in combinations(labels, 2):
        difference = paired_difference(quality[label], quality[other])
        bits = {"n": difference.n, "mean": difference.mean, "low": difference.low, "high": difference.high}
        found.append({"variant": label, "other": other, "bits": bits, "time": _time_ratio(label, other, steps, timing)})
    return found


def _time_ratio(label: str, other: str, steps: Mapping[str, int], timing: Timing) -> dict[str, Any] | None:
    """Of the steps as they were measured in turns, repetition by repetition, so that the machine's drift cancels."""
    if label not in timing or other not in timing:
        return None
    more = steps[label] / steps[other]
    mine, theirs = timing[label], timing[other]
    found: dict[str, Any] = {"ratio": more * mine["median"] / theirs["median"], "low": None, "high": None}
    own, others = mine.get("samples") or [], theirs.get("samples") or []
    if own and len(own) == len(others):
        ratios = [more * a / b for a, b in zip(own, others, strict=True)]
        found["low"], found["high"] = median_interval(ratios)
    return found
