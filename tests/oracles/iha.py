"""Interleaved Head Attention, both readings, from the steps that the docstring of headloom/mechanism/iha.py numbers."""

import math

import torch

from oracles.common import Row, attend, base_heads, linear, over_batch, rotate, row_weights


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    one_row = _paired_row if s.interaction == "paired" else _interleaved_row
    return over_batch(one_row, w, x_BTD, s, positions, padding, documents)


def sees(row: Row, s, n: int, p: int, n2: int, p2: int) -> bool:
    """Whether pseudo-query (n, p) sees pseudo-key (n2, p2): the token rule, and in virtual order the expanded index."""
    if not row.sees(n, n2):
        return False
    if not s.causal or s.order == "token":
        return True
    return n2 != n or p2 <= p  # among causal tokens: n2 P + p2 <= n P + p


def _mixed(mix, parts, h, p):
    """sum_m mix[h, p, m] parts[m]"""
    total = mix[h, p, 0] * parts[0]
    for m in range(1, len(parts)):
        total = total + mix[h, p, m] * parts[m]
    return total


def _pseudo(w, x_TD, s, row: Row):
    """q, k, v as dicts (token, head, pseudo-head) -> vector, rotated at n P + p or at n."""
    q, k, v = {}, {}, {}
    for n in range(row.tokens):
        base_q, base_k, base_v = base_heads(w, x_TD[n], s)
        for h in range(s.num_heads):
            for p in range(s.pseudo_heads):
                place = row.positions[n] * s.pseudo_heads + p if s.phase == "virtual" else row.positions[n]
                q[n, h, p] = rotate(_mixed(w["q_mix.weight"], base_q, h, p), place, s.inv_freq, s.rope_factor)
                k[n, h, p] = rotate(_mixed(w["k_mix.weight"], base_k, h, p), place, s.inv_freq, s.rope_factor)
                v[n, h, p] = _mixed(w["v_mix.weight"], base_v, h, p)
    return q, k, v


def _scale(s):
    return s.scale if s.scale is not None else 1 / math.sqrt(s.query_dim)


def _interleaved_row(w, x_TD, s, row: Row):
    q, k, v = _pseudo(w, x_TD, s, row)
    H, P = s.num_heads, s.pseudo_heads
    rows = []
    for n in range(row.tokens):
        simulated = {}
        for p in range(P):
            keys = [(m, r) for m in range(row.tokens) for r in range(P) if sees(row, s, n, p, m, r)]
            for h in range(H):
                simulated[h, p] = attend(
                    q[n, h, p], [k[m, h, r] for m, r in keys], [v[m, h, r] for m, r in keys], s, _scale(s), s.value_dim
                )
        heads = []
        for h in range(H):
            total = torch.zeros(s.value_dim, dtype=x_TD.dtype)
            for p in range(P):
                if s.collapse == "full":
                    for g in range(H):
                        total = total + w["out_mix.weight"][h, g, p] * simulated[g, p]
                elif s.collapse == "head":
                    total = total + w["out_mix.weight"][h, p] * simulated[h, p]
                else:
                    total = total + simulated[h, p] / P
            heads.append(total)
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)


def _paired_row(w, x_TD, s, row: Row):
    """The independent statement: (H P, H) matrices, H P softmax attentions at the tokens' positions, mean over P."""
    H, P, T = s.num_heads, s.pseudo_heads, row.tokens
    streams: dict[str, list[torch.Tensor]] = {"q": [], "k": [], "v": []}
    for n in range(T):
        for name, parts in zip("qkv", base_heads(w, x_TD[n], s), strict=True):
            matrix = w[f"{name}_mix.weight"].reshape(H * P, len(parts))
            streams[name].append(matrix @ torch.stack(parts))
    q, k, v = streams["q"], streams["k"], streams["v"]
    rows = []
    for n in range(T):
        seen = [m for m in range(T) if row.sees(n, m)]
        outs = []
        for a in range(H * P):
            query = rotate(q[n][a], row.positions[n], s.inv_freq, s.rope_factor)
            keys = [rotate(k[m][a], row.positions[m], s.inv_freq, s.rope_factor) for m in seen]
            outs.append(attend(query, keys, [v[m][a] for m in seen], s, _scale(s), s.value_dim))
        heads = torch.stack(outs).reshape(H, P, s.value_dim).mean(1)
        rows.append(linear(w, "o_proj", heads.reshape(-1), s.projection))
    return torch.stack(rows)


def patterns(w, x_TD, s):
    """(H, T*P, T*P) weights of the interleaved reading on one unpadded row, token-major, zero where invisible."""
    row, P = Row(x_TD.shape[0], s), s.pseudo_heads
    q, k, _ = _pseudo(w, x_TD, s, row)
    size = row.tokens * P
    out = torch.zeros(s.num_heads, size, size, dtype=x_TD.dtype)
    for h in range(s.num_heads):
        for a in range(size):
            seen = [b for b in range(size) if sees(row, s, a // P, a % P, b // P, b % P)]
            keys = [k[b // P, h, b % P] for b in seen]
            out[h, a, seen] = row_weights(q[a // P, h, a % P], keys, s, _scale(s)).detach()
    return out


def effective(w, x_TD, s):
    """M[h, m, n, n'] = sum over g, p, p' of out_mix[h,g,p] A_g[(n,p),(n',p')] v_mix[g,p',m], one unpadded row."""
    A, P, H, T = patterns(w, x_TD, s), s.pseudo_heads, s.num_heads, x_TD.shape[0]
    M = torch.zeros(H, s.num_kv_heads, T, T, dtype=x_TD.dtype)
    for h in range(H):
        for g in range(H):
            for p in range(P):
                if s.collapse == "full":
                    c = w["out_mix.weight"][h, g, p]
                elif g != h:
                    continue
                else:
                    c = w["out_mix.weight"][h, p] if s.collapse == "head" else 1 / P
                for p2 in range(P):
                    for m in range(s.num_kv_heads):
                        M[h, m] += (c * A[g, p::P, p2::P] * w["v_mix.weight"][g, p2, m]).detach()
    return M
