"""Tensor Product Attention: every head's vector as (1/R) sum_r A[r, h] B[r], then softmax attention."""

import torch

from oracles import gqa
from oracles.common import linear


def heads(w, x, s):
    """One token's q, k (H of K), v (H of V), not rotated."""
    found = {}
    for letter, rank, width in (("q", s.q_rank, s.head_dim), ("k", s.k_rank, s.head_dim), ("v", s.v_rank, s.value_dim)):
        if letter == "q" and s.kv_only:
            flat = linear(w, "q_proj", x, s.projection)
            found["q"] = [flat[h * width : (h + 1) * width] for h in range(s.num_heads)]
            continue
        a = linear(w, f"{letter}_a", x, s.projection)
        b = linear(w, f"{letter}_b", x, s.projection)
        found[letter] = []
        for h in range(s.num_heads):
            total = torch.zeros(width, dtype=x.dtype)
            for r in range(rank):
                total = total + a[r * s.num_heads + h] * b[r * width : (r + 1) * width]
            found[letter].append(total / rank)
    return found["q"], found["k"], found["v"]


output = gqa.output
patterns = gqa.patterns
