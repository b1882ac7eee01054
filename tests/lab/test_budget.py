import random

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.plan.budget import nearest, setting, turn_knobs, with_knob
from headloom.lab.spec.resolved import Shape

SHAPE = Shape(
    num_layers=2, hidden_size=128, num_heads=8, head_dim=16, intermediate_size=344, tokens=128, batch_size=8, steps=300
)


def match(count, target, *, start=344, label="the variant", tolerance=0.005):
    """By the feed-forward width alone."""
    shape = SHAPE.model_copy(update={"intermediate_size": start})
    return turn_knobs(
        shape,
        ("F",),
        lambda s: count(s.intermediate_size),
        target,
        match="parameters",
        label=label,
        tolerance=tolerance,
    )


def test_finds_the_nearest_of_all_widths():
    rng = random.Random(0)
    for _ in range(200):
        fixed, slope = rng.randrange(1000), rng.randrange(1, 40)
        target = fixed + slope * rng.randrange(200, 900) + rng.randrange(slope)
        shape, found = match(lambda f, a=fixed, b=slope: a + b * f, target, start=rng.randrange(1, 2000))
        best = min(abs(fixed + slope * f - target) for f in range(1, 1000))
        assert abs(found.count - target) == best
        assert found.count == fixed + slope * shape.intermediate_size
        assert found.relative == pytest.approx(found.count / target - 1)


def test_counts_few_models():
    counted = []
    match(lambda f: counted.append(f) or 1000 + 12 * f, 20_000, start=1500)
    assert len(counted) == len(set(counted)) < 16


def test_too_coarse_a_step_is_refused_and_names_the_nearest():
    with pytest.raises(HeadloomError) as caught:
        match(lambda f: 1000 * f, 2400, start=2, label="iha")
    assert str(caught.value).startswith("iha cannot be matched to 2,400 parameters within 0.5%")
    assert "2,000 (-16.7%) at intermediate_size=2" in str(caught.value)


def test_too_many_parameters_already_at_width_one():
    with pytest.raises(HeadloomError, match=r"10,003 \(\+100.1%\) at intermediate_size=1"):
        match(lambda f: 10_000 + 3 * f, 5000, start=100)


def test_half_a_percent_is_the_limit():
    assert match(lambda f: 1005 if f == 1 else 9999, 1000, start=2)[1].relative == pytest.approx(0.005)
    with pytest.raises(HeadloomError):
        match(lambda f: 1006 if f == 1 else 9999, 1000, start=2)


def test_values_without_a_model_are_passed_over():
    def count(value):
        if value % 3:
            raise HeadloomError("num_kv_heads must divide num_heads")
        return 10 * value

    assert nearest(count, 95, start=4).value == 9
    with pytest.raises(HeadloomError, match="no model at all"):
        nearest(lambda value: (_ for _ in ()).throw(HeadloomError("no model at all")), 95, start=4)


def test_what_each_knob_turns():
    assert with_knob(SHAPE, "F", 7).intermediate_size == 7
    assert with_knob(SHAPE, "layers", 3).num_layers == 3
    more = with_knob(SHAPE, "heads", 12)
    assert (more.num_heads, more.head_dim, more.hidden_size) == (12, 16, 128)
    wide = with_knob(SHAPE, "width", 9)  # nine pairs of features for each of eight heads
    assert (wide.hidden_size, wide.head_dim, wide.num_heads, wide.intermediate_size) == (144, 18, 8, 384)
    for knob in ("F", "layers", "heads", "width", "steps"):
        assert with_knob(SHAPE, knob, setting(SHAPE, knob)) == SHAPE


def test_the_first_knob_comes_near_and_the_last_must_reach():
    def count(shape):
        return 1000 * shape.num_layers * shape.steps

    shape, found = turn_knobs(SHAPE, ("layers", "steps"), count, 3.4 * 300 * 1000, match="flops", tolerance=0.01)
    assert (shape.num_layers, shape.steps) == (3, 340)
    assert found.relative == 0
    with pytest.raises(HeadloomError, match=r"training FLOPs within 1.0%: .* \(-11.8%\) at num_layers=3"):
        turn_knobs(SHAPE, ("layers",), count, 3.4 * 300 * 1000, match="flops", tolerance=0.01)
