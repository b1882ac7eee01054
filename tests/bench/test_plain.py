"""The straightforward forms compute what the mechanisms do: a ratio of times compares equals."""

import pytest
import torch

import headloom as hl
from headloom.bench.plain import plain_form
from headloom.core.errors import HeadloomError

CASES = [
    ("mha", {}),
    ("mha", {"window": 5}),
    ("gqa", {"num_kv_heads": 2}),
    ("iha", {"pseudo_heads": 3}),
    ("iha", {"pseudo_heads": 3, "window": 4, "phase": "token", "num_kv_heads": 2, "collapse": "head"}),
    ("iha", {"pseudo_heads": 3, "interaction": "paired"}),
    ("sas", {}),
    ("sas", {"kernel_size": 1, "num_kv_heads": 2}),
]


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_equal_outputs_and_gradients(name, options):
    attention = hl.attention(name, hidden_size=24, num_heads=4, **options).double()
    x = torch.randn(2, 11, 24, dtype=torch.float64, requires_grad=True)
    found, want = attention(x), plain_form(attention)(attention, x)
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    wrt = (x, *attention.parameters())
    for a, b in zip(*(torch.autograd.grad(out.square().sum(), wrt) for out in (found, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_without_one():
    with pytest.raises(HeadloomError, match="linear has no straightforward form"):
        plain_form(hl.attention("linear", hidden_size=8, num_heads=2))


@pytest.mark.parametrize("name", ["math", "scored", "torch"])
def test_a_mechanism_with_the_name_of_something_else_in_that_file_has_none(name):
    attention = hl.attention("linear", hidden_size=8, num_heads=2)
    attention.name = name
    with pytest.raises(HeadloomError, match=f"{name} has no straightforward form"):
        plain_form(attention)
