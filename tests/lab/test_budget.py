import random

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.budget import match_parameters


def test_finds_the_nearest_of_all_widths():
    rng = random.Random(0)
    for _ in range(200):
        fixed, slope = rng.randrange(1000), rng.randrange(1, 40)
        target = fixed + slope * rng.randrange(200, 900) + rng.randrange(slope)
        found = match_parameters(lambda f, a=fixed, b=slope: a + b * f, target, start=rng.randrange(1, 2000))
        best = min(abs(fixed + slope * f - target) for f in range(1, 1000))
        assert abs(found.parameters - target) == best
        assert found.parameters == fixed + slope * found.intermediate_size
        assert found.relative == pytest.approx(found.parameters / target - 1)


def test_counts_few_models():
    counted = []
    match_parameters(lambda f: counted.append(f) or 1000 + 12 * f, 20_000, start=1500)
    assert len(counted) == len(set(counted)) < 16


def test_too_coarse_a_step_is_refused_and_names_the_nearest():
    with pytest.raises(HeadloomError) as caught:
        match_parameters(lambda f: 1000 * f, 2400, start=2, label="iha")
    assert str(caught.value).startswith("iha cannot be matched to 2,400 parameters within 0.5%")
    assert "2,000 (-16.7%) at intermediate_size=2" in str(caught.value)


def test_too_many_parameters_already_at_width_one():
    with pytest.raises(HeadloomError, match=r"10,003 \(\+100.1%\) at intermediate_size=1"):
        match_parameters(lambda f: 10_000 + 3 * f, 5000, start=100)


def test_half_a_percent_is_the_limit():
    assert match_parameters(lambda f: 1005 if f == 1 else 9999, 1000, start=2).relative == pytest.approx(0.005)
    with pytest.raises(HeadloomError):
        match_parameters(lambda f: 1006 if f == 1 else 9999, 1000, start=2)
