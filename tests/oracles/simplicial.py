"""2-simplicial attention from the equations: for every query a loop over all visible pairs of keys."""

import math

import torch

from oracles.common import Row, base_heads, linear, over_batch, rms_norm


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def second_heads(w, x, s):
    """One token's k2 (G of K, normed, plus 1/K) and v2 (G of V, plus 1)."""
    G, K, V = s.num_kv_heads, s.head_dim, s.value_dim
    k, v = linear(w, "k2_proj", x, s.projection), linear(w, "v2_proj", x, s.projection)
    if s.qk_norm == "width":
        k = rms_norm(k, w["k2_norm.weight"], s.norm_eps)
    keys = [k[g * K : (g + 1) * K] for g in range(G)]
    if s.qk_norm == "head":
        keys = [rms_norm(key, w["k2_norm.weight"], s.norm_eps) for key in keys]
    return [key + 1 / K for key in keys], [v[g * V : (g + 1) * V] + 1 for g in range(G)]


def pairs_of(row: Row, s, i):
    """The pairs (j, k) that token i sees: both visible, j closer than W1 and k closer than W2."""
    first = row.tokens if s.first_window is None else s.first_window
    seen = [n for n in range(row.tokens) if row.sees(i, n)]
    return [(j, k) for j in seen for k in seen if abs(i - j) < first and abs(i - k) < s.second_window]


def weights_of_pairs(q, k1, k2, pairs, s):
    scale = s.scale if s.scale is not None else 1 / math.sqrt(s.head_dim)
    logits = torch.stack([(q * k1[j] * k2[k]).sum() * scale for j, k in pairs])
    if s.softcap is not None:
        logits = s.softcap * torch.tanh(logits / s.softcap)
    if s.score == "identity":
        return logits
    if s.score == "hard":
        best = (logits == logits.max()).to(logits.dtype)
        return best / best.sum()
    if s.by_log_sum:
        return torch.exp(logits - torch.logsumexp(logits, 0))
    exps = torch.exp(logits - logits.detach().max())
    return exps / exps.sum()


def _row(w, x_TD, s, row: Row):
    q, k1, v1 = zip(*(base_heads(w, x, s) for x in x_TD), strict=True)
    k2, v2 = zip(*(second_heads(w, x, s) for x in x_TD), strict=True)
    rows = []
    for i in range(row.tokens):
        pairs = pairs_of(row, s, i)
        heads = []
        for h in range(s.num_heads):
            g = h // (s.num_heads // s.num_kv_heads)
            total = torch.zeros(s.value_dim, dtype=x_TD.dtype)
            if pairs:
                weights = weights_of_pairs(q[i][h], [k[g] for k in k1], [k[g] for k in k2], pairs, s)
                for weight, (j, k) in zip(weights, pairs, strict=True):
                    total = total + weight * v1[j][g] * v2[k][g]
            heads.append(total)
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)
