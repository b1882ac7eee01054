"""What is read between variants, worked out by hand from curves and step times that are given."""

import pytest

from headloom.lab.results.readings import at_step, at_time, pairwise_differences, time_sentence
from headloom.lab.results.statistics import paired_difference
from headloom.records.results import StepTime, TimeRatio
from headloom.records.runs import CurvePoint

CURVE = [CurvePoint(step=step, seconds=0.0, bits_per_byte=bits) for step, bits in ((10, 4.0), (20, 3.0), (40, 2.0))]
AGAINST = {"mha": None, "iha": "mha", "gqa": "mha"}
STEPS = dict.fromkeys(AGAINST, 40)
# mha takes 40 x 1 s; iha stands at step 25 then, a quarter of the way from 3.0 to 2.0; gqa is at its end after 32 s


def step(median, samples=()):
    return StepTime(median=median, low=median, high=median, repeats=len(samples), samples=samples)


def raised(by):
    return [point.model_copy(update={"bits_per_byte": point.bits_per_byte + by}) for point in CURVE]


TIMING = {"mha": step(1.0), "iha": step(1.6), "gqa": step(0.8)}


CURVES = {
    "mha": {0: raised(0.0), 1: raised(0.1), 2: raised(0.2)},
    "iha": {0: raised(-0.5), 1: raised(-0.3), 2: raised(-0.4)},
    "gqa": {0: raised(0.2), 1: raised(0.2)},
}


@pytest.mark.parametrize(
    ("step", "bits"), [(9.9, None), (10, 4.0), (15, 3.5), (20, 3.0), (25, 2.75), (40, 2.0), (99, 2.0)]
)
def test_a_curve_is_read_on_the_line_between_its_evaluations(step, bits):
    assert at_step(CURVE, step) == bits
    assert at_step([], step) is None


def test_every_variant_is_read_at_the_time_at_which_its_reference_ends():
    read = at_time(AGAINST, STEPS, CURVES, TIMING)
    assert {label: row.seconds for label, row in read.items()} == dict.fromkeys(AGAINST, 40.0)
    assert {label: row.step for label, row in read.items()} == {"mha": 40, "iha": 25, "gqa": 50}
    assert {label: row.share for label, row in read.items()} == {"mha": 1.0, "iha": 0.625, "gqa": 1.25}
    assert read["iha"].bits_per_byte.values == pytest.approx({0: 2.25, 1: 2.45, 2: 2.35})
    assert read["gqa"].bits_per_byte.mean == pytest.approx(2.2)
    expected = paired_difference({0: 2.25, 1: 2.45, 2: 2.35}, {0: 2.0, 1: 2.1, 2: 2.2})
    assert read["iha"].difference.mean == pytest.approx(expected.mean)
    assert read["iha"].difference.half_width == pytest.approx(expected.half_width)
    assert (read["iha"].difference.n, read["gqa"].difference.n) == (3, 2)
    assert read["mha"].difference is None
    said = time_sentence(AGAINST, read, "bits per byte")
    assert "at mha's training time (40 s)" in said
    assert "There the learning rate of iha has not come down to the end of its schedule" in said


def test_what_was_not_measured_is_not_read():
    assert at_time(AGAINST, STEPS, CURVES, {}) == {}
    assert set(at_time(AGAINST, STEPS, {**CURVES, "iha": {}}, TIMING)) == {"mha", "gqa"}
    early = at_time(AGAINST, STEPS, CURVES, {**TIMING, "iha": step(8.0)})["iha"]  # step 5, before the first
    assert (early.bits_per_byte.n, early.difference.mean) == (0, None)
    assert time_sentence(AGAINST, {}, "bits per byte") is None


def test_a_variant_that_is_too_slow_for_a_reading_is_said_to_be():
    read = at_time(AGAINST, STEPS, CURVES, {**TIMING, "iha": step(8.0)})
    said = time_sentence(AGAINST, read, "bits per byte")
    assert " over 2 seeds at mha's training time (40 s)" in said  # gqa's pairs, and not "0 to 2 seeds"
    assert said.endswith(" In mha's training time (40 s), iha did not reach the first evaluation.")
    del read["gqa"]
    assert time_sentence(AGAINST, read, "bits per byte") == (
        "In mha's training time (40 s), iha did not reach the first evaluation."
    )


def test_times_are_told_apart_by_the_interval_of_their_ratio():
    """Nine repetitions of 28.2 and 28.6 ms on a machine that drifts: the interval is between the second smallest
    and the second largest of the nine ratios, which holds the median with 96 %."""
    drift = [0, 9, 1, 8, 2, 7, 3, 6, 4]
    mha = [28.2 + d for d in drift]
    slower = [0.4, -0.3, 0.5, 0.6, -0.2, 0.7, 0.4, 0.3, 0.5]
    gqa = [a + more for a, more in zip(mha, slower, strict=True)]
    sas = [2.7 * a for a in mha]
    timing = {"mha": step(32.2, mha), "gqa": step(32.5, gqa)}
    timing["sas"] = step(2.7 * 32.2, sas)
    quality = {"mha": {0: 2.9, 1: 2.8}, "gqa": {0: 2.6, 1: 2.7}, "sas": {0: 2.5}}
    found = pairwise_differences(["mha", "gqa", "sas"], quality, {"mha": 300, "gqa": 300, "sas": 150}, timing)
    assert [(pair.variant, pair.other) for pair in found] == [("mha", "gqa"), ("mha", "sas"), ("gqa", "sas")]
    time = found[0].time
    ratios = sorted(a / b for a, b in zip(mha, gqa, strict=True))
    assert (time.low, time.high) == pytest.approx((ratios[1], ratios[-2]))
    assert time.low < 1 < time.high
    half = found[1].time  # sas makes half the steps
    assert (half.ratio, half.low, half.high) == pytest.approx((2 / 2.7,) * 3)
    bits = found[0].bits
    assert (bits.n, bits.mean) == (2, pytest.approx(0.2)) and bits.low < 0 < bits.high
    assert found[1].bits.low is None  # one pair


def test_step_times_without_their_samples_give_no_interval():
    (found,) = pairwise_differences(["a", "b"], {"a": {}, "b": {}}, {"a": 2, "b": 1}, {"a": step(1.0), "b": step(4.0)})
    assert found.time == TimeRatio(ratio=0.5, low=None, high=None)
    assert pairwise_differences(["a", "b"], {"a": {}, "b": {}}, {"a": 2, "b": 1}, {})[0].time is None
