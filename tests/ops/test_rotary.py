"""Rotary tables: half-split, wide enough for any model type, scaled once."""

import math

import pytest
import torch

from headloom.ops.rotary import Rotary, rotate


def test_half_split_by_hand():
    """Width 4, theta 100, position 2: features (0, 2) turn by 2, features (1, 3) by 0.2."""
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0]]]], dtype=torch.float64)
    out = rotate(x, Rotary(100.0, 4).tables(torch.tensor([[2]]), torch.float64))[0, 0, 0]
    c, s, d, t = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
    want = [c - 3 * s, 2 * d - 4 * t, 3 * c + s, 4 * d + 2 * t, 5.0]
    torch.testing.assert_close(out, torch.tensor(want, dtype=torch.float64), atol=1e-15, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_tables_are_wide(dtype):
    """2048 positions at width 32: float32 tables whatever the model's type, wrong by float32's rounding only."""
    positions = torch.arange(2048)
    cos, sin = Rotary(10000.0, 32).tables(positions, dtype)
    assert cos.dtype == sin.dtype == torch.float32
    angles = positions.double()[:, None] * 10000.0 ** -(torch.arange(0, 32, 2).double() / 32)
    angles = torch.cat([angles, angles], 1)
    assert (cos - angles.cos()).abs().max() < 5e-4 and (sin - angles.sin()).abs().max() < 5e-4
    assert len(torch.unique(torch.stack([cos[:, 0], sin[:, 0]], 1), dim=0)) == 2048
    assert Rotary(10000.0, 32).tables(positions, torch.float64)[0].dtype == torch.float64


def test_rotation_depends_on_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    rotary = Rotary(10000.0, 8)

    def product(m, n):
        turned = [rotate(x, rotary.tables(torch.tensor([[p]]), x.dtype)) for x, p in ((q, m), (k, n))]
        return float((turned[0] * turned[1]).sum())

    assert abs(product(9, 4) - product(105, 100)) < 1e-12
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_low_precision_inputs_are_turned_in_float32():
    x = torch.randn(1, 1, 2000, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    positions = torch.arange(2000)[None]
    exact = rotate(x.double(), Rotary(10000.0, 32).tables(positions, torch.float64))
    found = rotate(x, Rotary(10000.0, 32).tables(positions, torch.bfloat16))
    assert found.dtype == torch.bfloat16
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-2 * 2**-4).all()
