"""Whether a difference between two variants exceeds the noise between seeds.

Every comparison is paired: seed by seed, variant minus reference, because a seed fixes the data order and the weights
both share. For n >= 2 pairs with differences d_1..d_n, mean m and standard deviation s (n - 1 in the denominator):

    interval  m +- t_{0.975, n-1} s / sqrt(n)        p = 2 P(t_{n-1} > |m| sqrt(n) / s)

One pair gives neither. From six pairs on a bootstrap interval stands beside it (resampled pairs, percentiles of the
mean): it does not need the differences to be normal, but fewer pairs have too few resamples to be worth one. `effect`
is the mean difference in units of the noise between seeds: m / sqrt((s_v^2 + s_r^2) / 2), from the two variants' own
standard deviations. Several variants against one reference are several chances to be lucky, so the p-values are
corrected by Holm's method and the verdict is taken from the corrected value.

How many more seeds would settle what is not settled is estimated as a power calculation does it: if mean m and standard
deviation s of the differences stayed what they are, the smallest number of pairs N that would show m with probability
0.8 in a two-sided test at 0.05 / k, k being the number of comparisons (the strictest of Holm's steps), has

    |m| >= (t_{1 - 0.05/(2k), N-1} + t_{0.8, N-1}) s / sqrt(N)
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from headloom.records.results import Difference, Quality, Spread, Verdict

LEVEL = 0.95
ALPHA = 0.05
BOOTSTRAP_PAIRS = 6
RESAMPLES = 10_000
POWER = 0.8
MOST_PAIRS = 1000  # beyond it the estimate says no more than that it is beyond


def mean_and_sd(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation."""
    n = len(values)
    return Spread(n, statistics.fmean(values) if n else None, statistics.stdev(values) if n > 1 else None)


def quality(values: Mapping[int, float]) -> Quality:
    """The spread of values by seed, with the values."""
    found = mean_and_sd(list(values.values()))
    return Quality(found.n, found.mean, found.sd, dict(values))


def paired_difference(variant: Mapping[int, float], reference: Mapping[int, float]) -> Difference:
    """The paired difference over the seeds that both finished, with its 95 % t interval and two-sided p-value."""
    from scipy import stats

    seeds = sorted(set(variant) & set(reference))
    found = mean_and_sd([variant[seed] - reference[seed] for seed in seeds])
    if found.mean is None or found.sd is None:
        return Difference(found.n, found.mean)
    standard_error = found.sd / math.sqrt(found.n)
    half = float(stats.t.ppf(0.5 + LEVEL / 2, found.n - 1)) * standard_error
    if standard_error > 0:
        p = float(2 * stats.t.sf(abs(found.mean) / standard_error, found.n - 1))
    else:  # every seed agrees to the last bit
        p = 1.0 if found.mean == 0 else 0.0
    low, high = bootstrap([variant[seed] - reference[seed] for seed in seeds])
    return Difference(
        found.n,
        found.mean,
        half,
        found.mean - half,
        found.mean + half,
        p,
        bootstrap_low=low,
        bootstrap_high=high,
        effect=_effect(found.mean, [variant[seed] for seed in seeds], [reference[seed] for seed in seeds]),
        sd=found.sd,
    )


def bootstrap(differences: Sequence[float]) -> tuple[float | None, float | None]:
    """The 95 % percentile interval of the mean of resampled pairs, always the same for the same numbers; (None, None)
    for fewer than six."""
    import numpy as np
    from scipy import stats

    if len(differences) < BOOTSTRAP_PAIRS:
        return None, None
    how: dict[str, Any] = {"confidence_level": LEVEL, "n_resamples": RESAMPLES, "method": "percentile"}
    found = stats.bootstrap([differences], np.mean, **how, rng=np.random.default_rng(0)).confidence_interval
    return float(found.low), float(found.high)


def _effect(mean: float, variant: Sequence[float], reference: Sequence[float]) -> float | None:
    noise = math.sqrt(((mean_and_sd(variant).sd or 0.0) ** 2 + (mean_and_sd(reference).sd or 0.0) ** 2) / 2)
    return mean / noise if noise > 0 else None


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction, in the order given.

    The smallest of m is multiplied by m, the next by m - 1, and so on; none may fall below one before it, none above 1.

    >>> [round(p, 6) for p in holm([0.04, 0.01, 0.03])]
    [0.06, 0.03, 0.06]
    """
    m = len(p_values)
    corrected = [0.0] * m
    floor = 0.0
    for rank, index in enumerate(sorted(range(m), key=lambda i: p_values[i])):
        floor = max(floor, min(1.0, (m - rank) * p_values[index]))
        corrected[index] = floor
    return corrected


def correct(differences: Sequence[Difference]) -> list[Difference]:
    """Fill `p_holm`, `verdict` and `more_seeds` of all variants that are measured against one reference.

    Verdicts: "better" or "worse" when the corrected p-value is below 0.05, "same" (not distinguishable) when it is not,
    "unknown" with fewer than two pairs.
    """
    known = [index for index, difference in enumerate(differences) if difference.p is not None]
    corrected = dict(zip(known, holm([differences[i].p or 0.0 for i in known]), strict=True))
    done = []
    for index, difference in enumerate(differences):
        if index not in corrected:
            done.append(difference)
            continue
        verdict: Verdict = "same"
        if corrected[index] < ALPHA and difference.mean:
            verdict = "better" if difference.mean < 0 else "worse"
        more = None
        if verdict != "same":
            more = 0
        elif difference.mean is not None and difference.sd is not None:
            more = max(1, pairs_needed(difference.mean, difference.sd, comparisons=len(known)) - difference.n)
        done.append(dataclasses.replace(difference, p_holm=corrected[index], verdict=verdict, more_seeds=more))
    return done


def pairs_needed(mean: float, sd: float, *, comparisons: int = 1) -> int:
    """How many pairs would show a difference like this one, as the module's head says; at most MOST_PAIRS."""
    import numpy as np
    from scipy import stats

    pairs = np.arange(2, MOST_PAIRS + 1)
    both = stats.t.ppf(1 - ALPHA / (2 * comparisons), pairs - 1) + stats.t.ppf(POWER, pairs - 1)
    enough = abs(mean) >= both * sd / np.sqrt(pairs)
    return int(pairs[enough.argmax()]) if enough.any() else MOST_PAIRS


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """An interval that contains the median with a probability of at least 95 %, whatever the values' distribution:
    from the k-th smallest to the k-th largest, with k as large as the binomial distribution allows. For fewer than six
    values it is their range, with a lower probability.

    >>> median_interval([9, 2, 3, 4, 5, 6, 7, 8, 1])  # 2 P(at most one of nine below) = 20/512
    (2.0, 8.0)
    """
    from scipy import stats

    if 2 * 0.5 ** len(values) > ALPHA:
        return min(values), max(values)
    found: Any = stats.quantile_test(values, q=0, p=0.5).confidence_interval(LEVEL)
    return float(found.low), float(found.high)


def decimals(*sizes: float | None) -> int:
    """Digits after the point that show two figures of the smallest of `sizes`: at least 3, at most 6."""
    real = [abs(size) for size in sizes if size]
    return min(6, max(3, 1 - math.floor(math.log10(min(real))))) if real else 3


def _p_text(p: float) -> str:
    return "p < 0.0001" if p < 0.0001 else f"p = {p:.2g}"


def sentence(label: str, reference: str, difference: Difference, *, unit: str, condition: str) -> str:
    """One sentence a careful reader may quote: what was found, how sure, under which condition.

    Args:
        label, reference: the two variants.
        difference: variant minus reference, corrected by `correct`; less is better.
        unit: what is measured, such as "bits per byte".
        condition: under what the two were equal, such as "at equal parameters (within 0.5 %)".
    """
    if difference.mean is None:
        return f"{label} cannot be compared with {reference}: no seed finished in both."
    if difference.half_width is None:
        seen = (
            f"{label} came out {abs(difference.mean):.{decimals(difference.mean)}f} {unit} "
            f"{'lower' if difference.mean < 0 else 'higher'} than {reference}"
            if difference.mean
            else f"{label} came out equal to {reference}"
        )
        return f"{seen} with one seed {condition}; one seed gives no interval, so this may be noise."
    places = decimals(difference.half_width)
    size = f"{abs(difference.mean):.{places}f} ± {difference.half_width:.{places}f} {unit}"
    over = f"over {difference.n} seeds {condition}"
    p = _p_text(difference.p_holm if difference.p_holm is not None else 1.0)
    if difference.verdict in ("better", "worse"):
        return f"{label} is {difference.verdict} than {reference} by {size} {over} ({p}, Holm)."
    signed = f"{difference.mean:+.{places}f} ± {difference.half_width:.{places}f} {unit}"
    return f"{label} is not distinguishable from {reference} {over}: difference {signed} ({p}, Holm)."


def summary(compared: Mapping[tuple[str, str], Difference], *, unit: str, condition: str) -> str:
    """All findings in one sentence: (label, what it was compared with) -> difference, corrected by `correct`.

    "iha is better than mha by 0.012 ± 0.004 bits per byte over 5 seeds at equal time; sas is not distinguishable."
    """
    if not compared:
        return ""
    parts = []
    for verdict in ("better", "worse"):
        for (label, reference), found in compared.items():
            if found.verdict == verdict:
                assert found.mean is not None and found.half_width is not None
                places = decimals(found.half_width)
                size = f"{abs(found.mean):.{places}f} ± {found.half_width:.{places}f} {unit}"
                parts.append(f"{label} is {verdict} than {reference} by {size}")
    alike = _by_reference(compared, "same")
    one = len({reference for _, reference in compared}) == 1
    for reference, labels in alike.items():
        whom = "" if one and parts else f" from {reference}"
        parts.append(f"{listed(labels)} {_are(labels)} not distinguishable{whom}")
    counts = sorted({found.n for found in compared.values() if found.verdict != "unknown"})
    if parts:
        parts[0] += f" over {counts[0] if len(counts) == 1 else f'{counts[0]} to {counts[-1]}'} seeds {condition}"
    for reference, labels in _by_reference(compared, "unknown").items():
        when = "" if parts else f" {condition}"
        parts.append(f"{listed(labels)} cannot be judged against {reference}{when}: fewer than two seeds ended in both")
    return "; ".join(parts) + "."


def _by_reference(compared: Mapping[tuple[str, str], Difference], verdict: str) -> dict[str, list[str]]:
    """What a verdict was given for: reference -> labels."""
    found: dict[str, list[str]] = {}
    for (label, reference), difference in compared.items():
        if difference.verdict == verdict:
            found.setdefault(reference, []).append(label)
    return found


def _are(labels: Sequence[str]) -> str:
    return "is" if len(labels) == 1 else "are"


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
