import math

import pytest
from scipy import stats

from headloom.lab.results.statistics import (
    correct,
    decimals,
    holm,
    mean_and_sd,
    median_interval,
    paired_difference,
    pairs_needed,
    sentence,
    summary,
)
from headloom.records.results import Difference


def test_spread_by_hand():
    found = mean_and_sd([1.0, 2.0, 4.0])
    assert (found.n, found.mean) == (3, pytest.approx(7 / 3))
    assert found.sd == pytest.approx(math.sqrt(7 / 3))  # deviations -4/3, -1/3, 5/3: squares sum to 42/9, over 2
    assert mean_and_sd([5.0]).sd is None
    assert mean_and_sd([]).mean is None


def test_interval_by_hand():
    # differences 1, 2, 3: mean 2, sd 1; t_{0.975, 2} = 4.302653 from a printed table
    found = paired_difference({0: 2.0, 1: 4.0, 2: 6.0}, {0: 1.0, 1: 2.0, 2: 3.0})
    assert found.mean == pytest.approx(2.0)
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert found.low == pytest.approx(2.0 - 4.302653 / math.sqrt(3), rel=1e-6)
    assert found.p == pytest.approx(0.0741799, rel=1e-5)  # t = 2 sqrt 3, 2 degrees of freedom


def test_agrees_with_scipys_paired_test():
    a, b = [2.41, 2.39, 2.44, 2.40], [2.45, 2.44, 2.46, 2.47]
    expected = stats.ttest_rel(a, b)
    interval = expected.confidence_interval(0.95)
    found = paired_difference(dict(enumerate(a)), dict(enumerate(b)))
    assert found.p == pytest.approx(expected.pvalue)
    assert (found.low, found.high) == (pytest.approx(interval.low), pytest.approx(interval.high))


def test_results_that_were_published_stay():
    """Bits per byte of seven seeds, and what was reported of them: a resampling in another order would give others."""
    mha = dict(enumerate([2.8412, 2.8697, 2.8533, 2.8601, 2.8466, 2.8710, 2.8555]))
    iha = dict(enumerate([2.8301, 2.8544, 2.8519, 2.8450, 2.8402, 2.8533, 2.8570]))
    found = paired_difference(iha, mha)
    assert (found.mean, found.sd) == pytest.approx((-0.009357142857142873, 0.007426048106240006), rel=1e-12)
    assert (found.low, found.high) == pytest.approx((-0.01622509187500421, -0.002489193839281538), rel=1e-12)
    assert (found.p, found.effect) == pytest.approx((0.015733046162865326, -0.901301995921112), rel=1e-12)
    resampled = (found.bootstrap_low, found.bootstrap_high)
    assert resampled == pytest.approx((-0.014085714285714321, -0.004214285714285726), rel=1e-12)


def test_pairs_by_seed_not_by_place():
    found = paired_difference({5: 1.0, 7: 2.0, 9: 9.0}, {9: 8.0, 5: 0.5, 6: 100.0})
    assert found.n == 2
    assert found.mean == pytest.approx(0.75)  # (1 - 0.5 + 9 - 8) / 2


def test_one_seed_has_no_interval():
    found = paired_difference({0: 2.0}, {0: 2.5})
    assert (found.mean, found.half_width, found.p) == (-0.5, None, None)
    text = sentence("iha", "mha", correct([found])[0], unit="bits per byte", condition="at equal parameters")
    assert "0.500 bits per byte lower than mha with one seed" in text
    assert "no interval" in text
    assert "better" not in text


def test_identical_seeds():
    same = paired_difference({0: 1.0, 1: 2.0}, {0: 1.0, 1: 2.0})
    assert (same.p, same.half_width) == (1.0, 0.0)
    shifted = paired_difference({0: 1.5, 1: 2.5}, {0: 1.0, 1: 2.0})
    assert (shifted.p, shifted.mean) == (0.0, 0.5)


def test_holm_by_hand():
    # sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1 = 0.04, 0.06, 0.06, 0.04 -> running maximum 0.04, 0.06, 0.06, 0.06
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_verdict_is_holms_not_the_interval():
    # p = 0.03 alone is below 0.05, the second of two with 0.001 stays so, the middle of three at 0.03 does not
    def one(p):
        return Difference(3, -0.01, 0.005, -0.015, -0.005, p)

    verdicts = [found.verdict for found in correct([one(0.03), one(0.001), one(0.03)])]
    assert verdicts == ["same", "better", "same"]
    assert correct([one(0.03)])[0].verdict == "better"


def test_a_variant_without_a_p_value_takes_no_part_in_the_correction():
    lonely = Difference(1, 0.1)
    found = correct([lonely, Difference(3, 0.01, 0.005, 0.005, 0.015, 0.03)])
    assert (found[0].verdict, found[0].p_holm) == ("unknown", None)
    assert (found[1].verdict, found[1].p_holm) == ("worse", 0.03)


def test_sentences():
    found = Difference(3, -0.0123, 0.0041, -0.0164, -0.0082, 0.002, 0.004, "better")
    text = sentence("iha", "mha", found, unit="bits per byte", condition="at equal parameters")
    assert text == (
        "iha is better than mha by 0.0123 ± 0.0041 bits per byte over 3 seeds at equal parameters (p = 0.004, Holm)."
    )
    same = Difference(3, 0.001, 0.02, -0.019, 0.021, 0.8, 1.0, "same")
    text = sentence("sas", "mha", same, unit="bits per byte", condition="at equal parameters")
    assert text.startswith("sas is not distinguishable from mha over 3 seeds at equal parameters: difference +0.001 ± ")
    nothing = sentence("sas", "mha", Difference(0, None), unit="bits per byte", condition="")
    assert nothing == "sas cannot be compared with mha: no seed finished in both."


@pytest.mark.parametrize(
    ("size", "places"), [(0.5, 3), (0.05, 3), (0.0123, 3), (0.0041, 4), (0.00041, 5), (1e-9, 6), (None, 3), (0.0, 3)]
)
def test_decimals_show_two_figures(size, places):
    assert decimals(size) == places


def test_bootstrap_stands_beside_the_interval_from_six_pairs_on():
    values = {seed: 2.0 - 0.01 * (1 + seed % 3) for seed in range(6)}  # differences -0.01, -0.02, -0.03 twice each
    found = paired_difference(values, dict.fromkeys(range(6), 2.0))
    assert found.bootstrap_low is not None and found.bootstrap_high is not None
    # the mean of six draws: sd 0.00816 / sqrt 6 = 0.00333, so about -0.02 +- 1.96 * 0.00333
    assert found.bootstrap_low == pytest.approx(-0.0265, abs=0.0007)
    assert found.bootstrap_high == pytest.approx(-0.0135, abs=0.0007)
    assert paired_difference(values, dict.fromkeys(range(6), 2.0)) == found
    five = paired_difference({seed: values[seed] for seed in range(5)}, dict.fromkeys(range(5), 2.0))
    assert (five.bootstrap_low, five.bootstrap_high) == (None, None)


def test_effect_is_in_units_of_the_noise_between_seeds():
    # variant 1, 3 (sd sqrt 2), reference 2, 6 (sd 2 sqrt 2): pooled sqrt((2 + 8) / 2) = sqrt 5; mean difference -2
    found = paired_difference({0: 1.0, 1: 3.0}, {0: 2.0, 1: 6.0})
    assert found.effect == pytest.approx(-2 / math.sqrt(5))
    assert paired_difference({0: 1.0, 1: 1.0}, {0: 2.0, 1: 2.0}).effect is None


def test_one_sentence_for_all():
    better = Difference(5, -0.0123, 0.0041, -0.0164, -0.0082, 0.002, 0.004, "better")
    worse = Difference(5, 0.05, 0.012, 0.038, 0.062, 0.002, 0.004, "worse")
    same = Difference(5, 0.001, 0.02, -0.019, 0.021, 0.8, 1.0, "same")

    def said(compared):
        return summary(compared, unit="bits per byte", condition="at equal time")

    assert said({("iha", "mha"): better, ("sas", "mha"): same}) == (
        "iha is better than mha by 0.0123 ± 0.0041 bits per byte over 5 seeds at equal time; "
        "sas is not distinguishable."
    )
    assert said({("iha", "mha"): same, ("sas", "mha"): same}) == (
        "iha and sas are not distinguishable from mha over 5 seeds at equal time."
    )
    assert said({("sas", "mha"): worse, ("iha", "gqa"): better, ("x", "gqa"): same}) == (
        "iha is better than gqa by 0.0123 ± 0.0041 bits per byte over 5 seeds at equal time; "
        "sas is worse than mha by 0.050 ± 0.012 bits per byte; x is not distinguishable from gqa."
    )
    alone, nothing = Difference(1, 0.1), Difference(0, None)
    assert said({("iha", "mha"): better, ("sas", "mha"): alone, ("gqa", "mha"): nothing}) == (
        "iha is better than mha by 0.0123 ± 0.0041 bits per byte over 5 seeds at equal time; "
        "sas and gqa cannot be judged against mha: fewer than two seeds ended in both."
    )
    assert said({("sas", "mha"): alone}) == (
        "sas cannot be judged against mha at equal time: fewer than two seeds ended in both."
    )
    assert said({}) == ""


@pytest.mark.parametrize(
    ("mean", "sd", "comparisons"), [(-0.2, 0.1, 1), (0.2, 0.1, 3), (0.05, 0.1, 1), (-0.02, 0.1, 2)]
)
def test_the_pairs_needed_are_the_fewest_that_meet_the_formula(mean, sd, comparisons):
    def shortfall(n):
        both = stats.t.ppf(1 - 0.05 / (2 * comparisons), n - 1) + stats.t.ppf(0.8, n - 1)
        return both * sd / math.sqrt(n) - abs(mean)

    n = pairs_needed(mean, sd, comparisons=comparisons)
    assert shortfall(n) <= 0 < shortfall(n - 1)


def test_pairs_needed_agree_with_a_printed_table_and_have_a_bound():
    assert pairs_needed(0.5, 1.0) in (33, 34)  # tables of the paired t test, effect 0.5, power 0.8: 34
    assert pairs_needed(0.0, 1.0) == pairs_needed(1e-6, 1.0) == 1000


def test_more_seeds_are_estimated_where_nothing_is_settled():
    reference = {0: 2.9, 1: 2.8, 2: 2.7}
    unclear = paired_difference({0: 2.6, 1: 2.65, 2: 2.65}, reference)  # -0.3, -0.15, -0.05
    clear = paired_difference({0: 2.0, 1: 1.9, 2: 1.81}, reference)
    alone = paired_difference({0: 2.6}, reference)
    found = correct([unclear, clear, alone])
    assert [difference.verdict for difference in found] == ["same", "better", "unknown"]
    assert found[0].sd == pytest.approx(math.sqrt((0.13333333**2 + 0.01666667**2 + 0.11666667**2) / 2))
    assert found[0].more_seeds == pairs_needed(unclear.mean, unclear.sd, comparisons=2) - 3 > 0
    assert (found[1].more_seeds, found[2].more_seeds) == (0, None)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8)])
def test_the_medians_interval_is_that_of_the_printed_table(n, k):
    assert median_interval(list(range(n, 0, -1))) == (k, n + 1 - k)
