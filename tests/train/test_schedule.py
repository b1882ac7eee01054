"""The learning rate of every step, worked by hand."""

from __future__ import annotations

import math

import pytest

from headloom.train.trainer import rate_factor


def test_warm_up_wastes_no_step_and_the_cosine_ends_where_it_says():
    rates = [rate_factor(step, warmup_steps=4, steps=12, final=0.1) for step in range(12)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[7] == pytest.approx(0.55)  # half way down: 4 of 8 steps
    assert rates[5] == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)
    assert rates[11] == pytest.approx(0.1)
    assert rates[3:] == sorted(rates[3:], reverse=True)


def test_edges():
    assert rate_factor(0, warmup_steps=0, steps=1, final=0.0) == 0.0
    assert [rate_factor(s, warmup_steps=2, steps=2, final=0.0) for s in (0, 1, 2)] == [0.5, 1.0, 0.0]
    assert rate_factor(99, warmup_steps=0, steps=4, final=0.3) == pytest.approx(0.3)
