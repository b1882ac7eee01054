"""Differential attention, first version: softmax(q1 k1) - lambda softmax(q2 k2) for pairs of heads, and a norm."""

import math

import torch

from oracles.common import Row, attend, base_heads, linear, over_batch, rms_norm, rotate


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def strength(w, layer=0):
    """(lambda, lambda_init)"""
    start = 0.8 - 0.6 * math.exp(-0.3 * layer)
    first = torch.exp((w["lambda_q1.weight"] * w["lambda_k1.weight"]).sum())
    second = torch.exp((w["lambda_q2.weight"] * w["lambda_k2.weight"]).sum())
    return first - second + start, start


def _row(w, x_TD, s, row: Row):
    layer = getattr(s, "layer", 0)
    pairs, kv_pairs = s.num_heads // 2, s.num_kv_heads // 2
    scale = s.scale if s.scale is not None else 1 / math.sqrt(s.head_dim)
    q, k, v = zip(*(base_heads(w, x, s) for x in x_TD), strict=True)
    q = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in q[t]] for t in range(row.tokens)]
    k = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in k[t]] for t in range(row.tokens)]
    lam, start = strength(w, layer)
    rows = []
    for t in range(row.tokens):
        seen = [n for n in range(row.tokens) if row.sees(t, n)]
        heads = []
        for i in range(pairs):
            g = i // (pairs // kv_pairs)
            values = [torch.cat([v[n][2 * g], v[n][2 * g + 1]]) for n in seen]
            one = attend(q[t][2 * i], [k[n][2 * g] for n in seen], values, s, scale, 2 * s.value_dim)
            two = attend(q[t][2 * i + 1], [k[n][2 * g + 1] for n in seen], values, s, scale, 2 * s.value_dim)
            heads.append(rms_norm(one - lam * two, w["head_norm.weight"], 1e-5) * (1 - start))
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)
