"""Simulated Attention Score: widen heads and features per token, attend with E heads of width J, merge E to H."""

import math

import torch

from oracles.common import Row, attend, base_heads, linear, over_batch, rotate


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def convolve(w, name, x):
    """Rows of `x` are channels (heads); slides over features, zero outside: y[e,f] = b[e] + sum W[e,c,t] x[c,f+t-r]."""
    weight, bias = w[f"{name}.weight"], w[f"{name}.bias"]
    width, half = len(x[0]), weight.shape[2] // 2
    edge = torch.zeros(len(x), half, dtype=x[0].dtype)
    padded = torch.cat([edge, torch.stack(list(x)), edge], dim=1)
    out = []
    for e in range(weight.shape[0]):
        total = bias[e] * torch.ones(width, dtype=x[0].dtype)
        for tap in range(weight.shape[2]):
            total = total + (weight[e, :, tap, None] * padded[:, tap : tap + width]).sum(0)
        out.append(total)
    return out


def widen_heads(w, name, x):
    """y = Conv(x); y + Conv(relu(y))"""
    y = convolve(w, f"head_{name}.0", x)
    return [a + b for a, b in zip(y, convolve(w, f"head_{name}.1", [torch.relu(row) for row in y]), strict=True)]


def widen_features(w, name, x):
    """z = Lin(y); z + Lin(relu(z)), the same for every head."""
    z = [linear(w, f"feature_{name}.0", row) for row in x]
    return [row + linear(w, f"feature_{name}.1", torch.relu(row)) for row in z]


def simulate(w, name, x, s):
    if name == "v":
        return widen_heads(w, name, x)
    if s.order == "head_first":
        return widen_features(w, name, widen_heads(w, name, x))
    return widen_heads(w, name, widen_features(w, name, x))


def _row(w, x_TD, s, row: Row):
    H, E, V = s.num_heads, s.simulated_heads, s.value_dim
    scale = s.scale if s.scale is not None else 1 / math.sqrt(s.simulated_width)
    q, k, v = [], [], []
    for n in range(row.tokens):
        base_q, base_k, base_v = base_heads(w, x_TD[n], s)
        place = row.positions[n]
        q.append([rotate(f, place, s.inv_freq, s.rope_factor) for f in simulate(w, "q", base_q, s)])
        k.append([rotate(f, place, s.inv_freq, s.rope_factor) for f in simulate(w, "k", base_k, s)])
        v.append(simulate(w, "v", base_v, s))
    rows = []
    for n in range(row.tokens):
        seen = [m for m in range(row.tokens) if row.sees(n, m)]
        outs = [attend(q[n][e], [k[m][e] for m in seen], [v[m][e] for m in seen], s, scale, V) for e in range(E)]
        if s.aggregate == "full":
            rows.append(linear(w, "o_proj", torch.cat(outs), s.projection))
        elif s.aggregate == "nonlinear":
            merged = []
            for f in range(V):
                hidden = linear(w, "head_o.0", torch.stack([o[f] for o in outs]))
                hidden = torch.stack([a * 0.5 * (1 + torch.erf(a / math.sqrt(2))) for a in hidden])
                merged.append(linear(w, "head_o.1", hidden))
            heads = torch.stack(merged, dim=1)
            if not seen:
                heads = torch.zeros_like(heads)
            rows.append(linear(w, "o_proj", heads.reshape(-1), s.projection))
        else:
            # the mean of the projected groups; a quantised projection is not linear, so there the groups meet first
            groups = [torch.cat(outs[i * H : (i + 1) * H]) for i in range(E // H)]
            if s.projection == "bit":
                groups = [sum(groups[1:], groups[0]) / len(groups)]
            projected = [linear(w, "o_proj", group, s.projection) for group in groups]
            rows.append(sum(projected[1:], projected[0]) / len(projected))
    return torch.stack(rows)
