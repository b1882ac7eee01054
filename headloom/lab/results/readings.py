"""What is read between variants from the records of their runs: quality at equal training time, and what tells any two
of them apart.

Times are steps times the measured step, never the clock of a run, which knows what else its machine did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

from headloom.lab.results.statistics import correct, listed, median_interval, paired_difference, quality, summary
from headloom.records.results import AtTime, Between, Pair, StepTime, TimeRatio
from headloom.records.runs import CurvePoint

Timing = Mapping[str, StepTime]
Curve = Sequence[CurvePoint]
FINISHED = 0.99  # a share of its steps from which a run's schedule is as good as finished


def at_step(curve: Curve, step: float) -> float | None:
    """Bits per byte after `step` steps: on the straight line between the two evaluations around it, and the last one's
    after the end. None before the first.

    >>> at_step([CurvePoint(step=s, seconds=0.0, bits_per_byte=b) for s, b in ((10, 4.0), (20, 3.0))], 12.5)
    3.75
    """
    if not curve or step < curve[0].step:
        return None
    for before, after in pairwise(curve):
        if step < after.step:
            share = (step - before.step) / (after.step - before.step)
            return before.bits_per_byte + share * (after.bits_per_byte - before.bits_per_byte)
    return curve[-1].bits_per_byte


def at_time(
    against: Mapping[str, str | None],
    steps: Mapping[str, int],
    curves: Mapping[str, Mapping[int, Curve]],
    timing: Timing,
) -> dict[str, AtTime]:
    """Label -> what it reaches in the whole training time of the variant it is compared with.

    Args:
        against: label -> whom it is compared with; None: a reference, which is read at its own end.
        steps: label -> steps of its runs. curves: label -> seed -> what its run found along the way.

    Differences are corrected over all of them. Labels without a curve or a measured step are left out.
    """
    places: dict[str, tuple[float, float]] = {}  # seconds, and the step that the label stands at then
    values: dict[str, dict[int, float]] = {}
    for label, other in against.items():
        other = other or label
        if label not in timing or other not in timing or not curves.get(label):
            continue
        seconds = steps[other] * timing[other].median
        step = seconds / timing[label].median if other != label else float(steps[label])
        places[label] = seconds, step
        read = {seed: at_step(curve, step) for seed, curve in curves[label].items()}
        values[label] = {seed: bits for seed, bits in read.items() if bits is not None}
    pairs = {label: other for label, other in against.items() if label in places and other in places}
    differences = correct([paired_difference(values[a], values[b]) for a, b in pairs.items()])
    compared = dict(zip(pairs, differences, strict=True))
    return {
        label: AtTime(
            seconds=seconds,
            step=step,
            share=step / steps[label],
            bits_per_byte=quality(values[label]),
            difference=compared.get(label),
        )
        for label, (seconds, step) in places.items()
    }


def time_sentence(against: Mapping[str, str | None], read: Mapping[str, AtTime], unit: str) -> str | None:
    """What `at_time` found, as one may quote it, with what there is to say against it."""
    compared = {
        (label, other): row.difference
        for label, row in read.items()
        if (other := against[label]) is not None and row.difference is not None
    }
    if not compared:
        return None
    whose = {other: read[other].seconds for _, other in compared}
    when = "the reference's training time"
    if len(whose) == 1:
        other, seconds = next(iter(whose.items()))
        when = f"{other}'s training time ({seconds:.3g} s)"
    early = [label for label, _ in compared if not read[label].bits_per_byte.n]
    reached = {pair: difference for pair, difference in compared.items() if pair[0] not in early}
    text = summary(reached, unit=unit, condition=f"at {when}")
    if early:
        text += f" In {when}, {listed(early)} did not reach the first evaluation."
    unfinished = [label for label, _ in reached if read[label].share < FINISHED]
    if unfinished:
        text += (
            f" There the learning rate of {listed(unfinished)} has not come down to the end of its schedule: a run "
            "planned for that time would do a little better."
        )
    return text.strip()


def pairwise_differences(
    labels: Sequence[str], qualities: Mapping[str, Mapping[int, float]], steps: Mapping[str, int], timing: Timing
) -> list[Pair]:
    """What tells any two variants apart. qualities: label -> seed -> bits per byte."""
    found = []
    for label, other in combinations(labels, 2):
        difference = paired_difference(qualities[label], qualities[other])
        bits = Between(n=difference.n, mean=difference.mean, low=difference.low, high=difference.high)
        found.append(Pair(variant=label, other=other, bits=bits, time=_time_ratio(label, other, steps, timing)))
    return found


def _time_ratio(label: str, other: str, steps: Mapping[str, int], timing: Timing) -> TimeRatio | None:
    """Of the steps as they were measured in turns, repetition by repetition, so that the machine's drift cancels."""
    if label not in timing or other not in timing:
        return None
    more = steps[label] / steps[other]
    mine, theirs = timing[label], timing[other]
    low = high = None
    if mine.samples and len(mine.samples) == len(theirs.samples):
        low, high = median_interval([more * a / b for a, b in zip(mine.samples, theirs.samples, strict=True)])
    return TimeRatio(ratio=more * mine.median / theirs.median, low=low, high=high)
