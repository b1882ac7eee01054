"""Differential attention, second version: 2 H queries, o_h = a_{2h} - sigmoid(lambda_h(x)) a_{2h+1}, no norm."""

import math
from types import SimpleNamespace

import torch

from oracles.common import Row, attend, base_heads, linear, over_batch, rotate


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def _row(w, x_TD, s, row: Row):
    H, G = s.num_heads, s.num_kv_heads
    scale = s.scale if s.scale is not None else 1 / math.sqrt(s.head_dim)
    wide = SimpleNamespace(**{**vars(s), "num_heads": 2 * H})
    q, k, v = zip(*(base_heads(w, x, wide) for x in x_TD), strict=True)
    q = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in q[t]] for t in range(row.tokens)]
    k = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in k[t]] for t in range(row.tokens)]
    rows = []
    for t in range(row.tokens):
        seen = [n for n in range(row.tokens) if row.sees(t, n)]
        scored = []
        for j in range(2 * H):
            g = j // (2 * H // G)
            scored.append(attend(q[t][j], [k[n][g] for n in seen], [v[n][g] for n in seen], s, scale, s.value_dim))
        gate = 1 / (1 + torch.exp(-linear(w, "lambda_proj", x_TD[t])))
        heads = [scored[2 * h] - gate[h] * scored[2 * h + 1] for h in range(H)]
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)
