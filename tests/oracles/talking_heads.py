"""Talking heads: logits mixed over heads before mask and softmax, weights mixed after; values of its own kv head."""

import math

import torch

from oracles.common import Row, base_heads, linear, over_batch, rotate


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def mixed_weights(w, q, keys, s):
    """q: H queries of one token; keys: per visible token its G keys. (H, visible) weights after both mixes."""
    H, group = s.num_heads, s.num_heads // s.num_kv_heads
    scale = s.scale if s.scale is not None else 1 / math.sqrt(s.query_dim)
    plain = [[(q[h] * k[h // group]).sum() * scale for k in keys] for h in range(H)]
    weights = []
    for i in range(H):
        logits = []
        for m in range(len(keys)):
            total = w["logit_mix.weight"][i, 0] * plain[0][m]
            for h in range(1, H):
                total = total + w["logit_mix.weight"][i, h] * plain[h][m]
            logits.append(total)
        logits = torch.stack(logits)
        if s.softcap is not None:
            logits = s.softcap * torch.tanh(logits / s.softcap)
        if s.score == "identity":
            weights.append(logits)
        elif s.score == "hard":
            best = (logits == logits.max()).to(logits.dtype)
            weights.append(best / best.sum())
        elif s.by_log_sum:
            weights.append(torch.exp(logits - torch.logsumexp(logits, 0)))
        else:
            exps = torch.exp(logits - logits.detach().max())
            weights.append(exps / exps.sum())
    rows = []
    for o in range(H):
        total = w["weight_mix.weight"][o, 0] * weights[0]
        for i in range(1, H):
            total = total + w["weight_mix.weight"][o, i] * weights[i]
        rows.append(total)
    return rows


def turned(w, x_TD, s, row):
    q, k, v = zip(*(base_heads(w, x, s) for x in x_TD), strict=True)
    q = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in q[t]] for t in range(row.tokens)]
    k = [[rotate(f, row.positions[t], s.inv_freq, s.rope_factor) for f in k[t]] for t in range(row.tokens)]
    return q, k, v


def _row(w, x_TD, s, row: Row):
    q, k, v = turned(w, x_TD, s, row)
    group = s.num_heads // s.num_kv_heads
    out = []
    for t in range(row.tokens):
        seen = [n for n in range(row.tokens) if row.sees(t, n)]
        heads = torch.zeros(s.num_heads, s.value_dim, dtype=x_TD.dtype)
        if seen:
            weights = mixed_weights(w, q[t], [k[n] for n in seen], s)
            heads = []
            for o in range(s.num_heads):
                total = weights[o][0] * v[seen[0]][o // group]
                for m in range(1, len(seen)):
                    total = total + weights[o][m] * v[seen[m]][o // group]
                heads.append(total)
            heads = torch.stack(heads)
        out.append(linear(w, "o_proj", heads.reshape(-1), s.projection))
    return torch.stack(out)


def patterns(w, x_TD, s):
    """(H, T, T) mixed weights of one unpadded row, zero where invisible."""
    row = Row(x_TD.shape[0], s)
    q, k, _ = turned(w, x_TD, s, row)
    out = torch.zeros(s.num_heads, row.tokens, row.tokens, dtype=x_TD.dtype)
    for t in range(row.tokens):
        seen = [n for n in range(row.tokens) if row.sees(t, n)]
        for o, weights in enumerate(mixed_weights(w, q[t], [k[n] for n in seen], s)):
            out[o, t, seen] = weights.detach()
    return out
