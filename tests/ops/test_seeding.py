"""Equal name and shape means equal values, whatever else differs; the caller's random state is untouched."""

from __future__ import annotations

import torch
from torch import nn

from headloom.ops.seeding import derive_seed, seeded_by_name


def make(width: int, seed: int = 3) -> dict[str, torch.Tensor]:
    model = nn.Sequential(nn.Linear(4, width), nn.Conv1d(3, 5, 3), nn.Linear(5, 6))
    with seeded_by_name(model, seed):
        torch.randn(width)  # a draw into no parameter shifts nothing
        for layer in model:
            layer.reset_parameters()
    return dict(model.named_parameters())


def test_equal_names_and_shapes_share_values():
    one, other, again = make(7), make(9), make(7)
    assert all(torch.equal(one[name], again[name]) for name in one)
    shared = [name for name in one if one[name].shape == other[name].shape]
    assert shared == ["1.weight", "1.bias", "2.weight", "2.bias"]
    assert all(torch.equal(one[name], other[name]) for name in shared)
    different = make(7, seed=4)
    assert not any(torch.equal(one[name], different[name]) for name in one)


def test_the_callers_random_state_is_restored():
    torch.manual_seed(1)
    expected = torch.rand(1)
    layer = nn.Linear(2, 2)
    torch.manual_seed(1)
    with seeded_by_name(layer, 0):
        layer.reset_parameters()
        torch.randn(5)
    assert torch.equal(torch.rand(1), expected)


def test_seeds_are_stable_over_machines():
    assert derive_seed(0, "a") == 7606779636460171844
