"""Linear attention: o_i = sum_j phi(q_i).phi(k_j) v_j / (sum_j phi(q_i).phi(k_j) + 1e-6), phi = elu + 1."""

import torch

from oracles.common import Row, base_heads, linear, over_batch


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def phi(x):
    return torch.stack([f + 1 if f > 0 else torch.exp(f) for f in x])


def _row(w, x_TD, s, row: Row):
    heads = [base_heads(w, x, s) for x in x_TD]
    rows = []
    for i in range(row.tokens):
        seen = [j for j in range(row.tokens) if row.sees(i, j)]
        outs = []
        for h in range(s.num_heads):
            g = h // (s.num_heads // s.num_kv_heads)
            numerator, denominator = torch.zeros(s.value_dim, dtype=x_TD.dtype), torch.zeros((), dtype=x_TD.dtype)
            for j in seen:
                score = (phi(heads[i][0][h]) * phi(heads[j][1][g])).sum()
                numerator, denominator = numerator + score * heads[j][2][g], denominator + score
            outs.append(numerator / (denominator + 1e-6))
        rows.append(linear(w, "o_proj", torch.cat(outs), s.projection))
    return torch.stack(rows)
