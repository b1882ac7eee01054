"""Memory of forward and backward passes, by counted allocations: no (T P)^2 anything; a window holds less than none."""

import pytest
import torch
from oracles.modules import training_peak

import headloom as hl
from headloom.bench.memory import peak_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"order": "virtual", "window": 256},
        {"order": "token", "window": 256},
        {"order": "virtual"},
        {"order": "token", "phase": "token"},
    ],
    ids=str,
)
def test_every_order_is_linear_in_the_tokens(options):
    """H = 8, K = 32, P = 4: the scores of 1024 tokens alone would take 512 MiB; 4096 tokens stay below 2 GiB."""
    sizes = {"hidden_size": 256, "num_heads": 8, "head_dim": 32, "pseudo_heads": 4}
    half, whole = (training_peak("iha", tokens, **sizes, **options) for tokens in (512, 1024))
    assert whole < 64 and whole < 2.1 * half


@pytest.mark.parametrize(
    ("name", "options", "tokens"), [("mha", {}, 4096), ("gqa", {}, 4096), ("iha", {"pseudo_heads": 2}, 2048)]
)
def test_a_window_needs_no_more_memory_than_none(name, options, tokens):
    """Counted allocations of a forward and backward pass: they fall with the window."""
    x, peaks = torch.randn(1, tokens, 64), {}
    for window in (None, 512, 128, 16):
        module = hl.attention(name, hidden_size=64, num_heads=4, window=window, **options)
        peaks[window] = peak_bytes(lambda module=module: module(x).sum().backward())
    assert peaks[None] > peaks[512] > peaks[128], peaks
    assert peaks[16] < peaks[512], peaks


def test_a_wide_window_needs_no_more_memory_than_none():
    """Most rows then see all before them, and the rest in one small mask."""
    x, peaks = torch.randn(1, 4096, 64), []
    for window in (None, 3000):
        module = hl.attention("mha", hidden_size=64, num_heads=4, window=window)
        peaks.append(peak_bytes(lambda module=module: module(x).sum().backward()))
    assert peaks[1] < peaks[0]
