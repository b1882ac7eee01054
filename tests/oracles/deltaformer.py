"""DeltaFormer, token by token: u_t = v_t - beta_t sum_{j<t} w_tj u_j, then causal softmax attention over u."""

import math
from types import SimpleNamespace

import torch

from oracles.common import Row, attend, base_heads, linear, over_batch, rotate, row_weights


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def corrected(k, v, beta, row: Row, s, scale):
    """u of one kv head for all tokens of one row: lists of vectors k[t], v[t], numbers beta[t]."""
    plain = SimpleNamespace(softcap=None, score="softmax", by_log_sum=s.by_log_sum)
    u = []
    for t in range(row.tokens):
        earlier = [j for j in range(t) if row.sees(t, j)]
        total = v[t]
        if earlier:
            weights = row_weights(k[t], [k[j] for j in earlier], plain, scale)
            for weight, j in zip(weights, earlier, strict=True):
                total = total - beta[t] * weight * u[j]
        u.append(total)
    return u


def _row(w, x_TD, s, row: Row):
    H, G, T = s.num_heads, s.num_kv_heads, row.tokens
    scale = s.scale if s.scale is not None else 1 / math.sqrt(s.head_dim)
    q, k, v = zip(*(base_heads(w, x, s) for x in x_TD), strict=True)
    q = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in q[t]] for t in range(T)]
    k = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in k[t]] for t in range(T)]
    beta = [linear(w, "beta_proj", x) for x in x_TD]
    u = [
        corrected([k[t][g] for t in range(T)], [v[t][g] for t in range(T)], [b[g] for b in beta], row, s, scale)
        for g in range(G)
    ]
    rows = []
    for t in range(T):
        seen = [n for n in range(T) if row.sees(t, n)]
        heads = []
        for h in range(H):
            g = h // (H // G)
            heads.append(attend(q[t][h], [k[n][g] for n in seen], [u[g][n] for n in seen], s, scale, s.value_dim))
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)
