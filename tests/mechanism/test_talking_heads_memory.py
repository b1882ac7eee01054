"""Memory of talking heads: all heads' scores of T = 8192 would take 2.1 GB for each of the several copies."""

import subprocess
import sys

SCRIPT = """
import resource, sys
import torch
from headloom.mechanism import attention

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

baseline = peak()
module = attention("talking_heads", hidden_size=128, num_heads=8, head_dim=16)
with torch.no_grad():
    assert module(torch.randn(1, 8192, 128)).isfinite().all()
print("forward", (peak() - baseline) / 2**30, flush=True)
x = torch.randn(1, 2048, 128, requires_grad=True)
module(x).square().mean().backward()
assert x.grad.isfinite().all() and module.logit_mix.weight.grad.abs().max() > 0
print("backward", (peak() - baseline) / 2**30, flush=True)
"""


def test_forward_of_8192_tokens_stays_within_bounds():
    """Forward at T = 8192, H = 8 within 1.5 GiB (it takes a fifth); the backward keeps one block too."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    peaks = [float(line.rsplit(" ", 1)[1]) for line in done.stdout.splitlines()]
    assert len(peaks) == 2 and max(peaks) < 1.5, done.stdout
