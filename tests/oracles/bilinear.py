"""Fully parameterised bilinear attention: o_i = sum_c softmax_j(x_i W_c x_j^T / sqrt D) x_j U_c."""

import math

import torch

from oracles.common import Row, attend, linear, over_batch


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def _row(w, x_TD, s, row: Row):
    D, H = s.hidden_size, getattr(s, "channels", None) or s.num_heads
    scale = s.scale if s.scale is not None else 1 / math.sqrt(D)
    rows = []
    for i in range(row.tokens):
        seen = [x_TD[j] for j in range(row.tokens) if row.sees(i, j)]
        if s.projection == "bit":  # quantised products are not sums of channels: one product for all of them
            flat = linear(w, "q_proj", x_TD[i], s.projection)
            outs = [attend(flat[c * D : (c + 1) * D], seen, seen, s, scale, D) for c in range(H)]
            rows.append(linear(w, "o_proj", torch.cat(outs), s.projection))
            continue
        total = torch.zeros(D, dtype=x_TD.dtype)
        for c in range(H):
            W_c = w["q_proj.weight"][c * D : (c + 1) * D].T  # acts as x W_c
            U_c = w["o_proj.weight"][:, c * D : (c + 1) * D].T
            total = total + attend(x_TD[i] @ W_c, seen, seen, s, scale, D) @ U_c
        rows.append(total if "o_proj.bias" not in w else total + w["o_proj.bias"])
    return torch.stack(rows)
