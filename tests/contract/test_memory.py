"""Memory: T = 4096, P = 4 never holds a (T P)^2 anything; a window holds less than none."""

import subprocess
import sys

import pytest
import torch

import headloom as hl
from headloom.bench.memory import peak_bytes

SCRIPT = """
import resource, sys
import torch
from headloom.mechanism import attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

baseline = peak()
sizes = dict(hidden_size=256, num_heads=8, head_dim=32, pseudo_heads=4)
for options in (
    dict(order="virtual", window=256),
    dict(order="token", window=256),
    dict(order="virtual"),
    dict(order="token", phase="token"),
):
    module = attention("iha", **sizes, **options)
    x = torch.randn(1, 4096, 256, requires_grad=True)
    module(x).square().mean().backward()
    assert x.grad.isfinite().all()
    print(options, (peak() - baseline) / 2**30, flush=True)
"""


def test_every_order_stays_within_two_gib():
    """Forward and backward, batch 1, H = 8, K = 32; materialised scores alone would take 8.6 GB a head group."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    peaks = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(peaks) == 4 and max(peaks) < 2.0, done.stdout


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
