"""mha, gqa, mqa: o_h = softmax(q_h k_{h//(H/G)}^T / sqrt K) v_{h//(H/G)}; out = concat_h(o_h) W_O."""

import math

import torch

from oracles.common import Row, attend, base_heads, linear, over_batch, rotate, row_weights


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def _scale(s):
    return s.scale if s.scale is not None else 1 / math.sqrt(s.query_dim)


def _turned(w, x_TD, s, row):
    q, k, v = zip(*(base_heads(w, x, s) for x in x_TD), strict=True)
    q = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in q[t]] for t in range(row.tokens)]
    k = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in k[t]] for t in range(row.tokens)]
    return q, k, v


def _row(w, x_TD, s, row: Row):
    q, k, v = _turned(w, x_TD, s, row)
    rows = []
    for t in range(row.tokens):
        seen = [n for n in range(row.tokens) if row.sees(t, n)]
        heads = []
        for h in range(s.num_heads):
            g = h // (s.num_heads // s.num_kv_heads)
            heads.append(attend(q[t][h], [k[n][g] for n in seen], [v[n][g] for n in seen], s, _scale(s), s.value_dim))
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)


def patterns(w, x_TD, s):
    """(H, T, T) attention weights of one unpadded row, zero where invisible."""
    row = Row(x_TD.shape[0], s)
    q, k, _ = _turned(w, x_TD, s, row)
    out = torch.zeros(s.num_heads, row.tokens, row.tokens, dtype=x_TD.dtype)
    for h in range(s.num_heads):
        g = h // (s.num_heads // s.num_kv_heads)
        for t in range(row.tokens):
            seen = [n for n in range(row.tokens) if row.sees(t, n)]
            out[h, t, seen] = row_weights(q[t][h], [k[n][g] for n in seen], s, _scale(s)).detach()
    return out
