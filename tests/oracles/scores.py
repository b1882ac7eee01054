"""Inputs, visible pairs and plain softmax attention for the tests of `attend`: (2, H, T P, K) tensors."""

import itertools

import torch

from oracles.common import visible

ROWS = {
    "packed": [[0] * 7 + [1] * 12, [0] * 10 + [1] * 9],
    "left": [[-1] * 6 + [0] * 13, [0] * 19],
    "right": [[0] * 13 + [-1] * 6, [-1] * 19],
    "alternating": [[0, 1] * 9 + [0], [0] * 19],
    "many": [list(range(19)), [i // 2 for i in range(19)]],
}


def draw(T, S, P, widths=(6, 6), dtype=torch.float64, H=4, G=2):
    generator = torch.Generator().manual_seed(T + S)
    shapes = [(2, H, T * P, widths[0]), (2, G, S * P, widths[0]), (2, G, S * P, widths[1])]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def pairs(T, S, causal, window, P, virtual, rows=None):
    """(2, T P, S P) bool by the definition in `oracles.common`."""
    out = torch.zeros(2, T * P, S * P, dtype=torch.bool)
    for b, t, n in itertools.product(range(2), range(T), range(S)):
        i, document = S - T + t, [0] * S if rows is None else rows[b]
        if visible(i, n, document[i], document[n], document[i] >= 0, document[n] >= 0, causal, window):
            for p, p2 in itertools.product(range(P), range(P)):
                out[b, t * P + p, n * P + p2] = not virtual or n != i or p2 <= p
    return out


def reference(q, k, v, seen, scale):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, None], -1e30)
    weights = torch.exp(logits - logits.amax(-1, keepdim=True)) * seen[:, None]
    return weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v


def gradients(out, inputs):
    generator = torch.Generator().manual_seed(3)
    cotangent = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return torch.autograd.grad(out, inputs, cotangent)
