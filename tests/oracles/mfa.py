"""mfa and mfa_kr: H query heads through two factors, one key, and a value of its own or made from the key."""

import math

import torch

from oracles.common import Row, attend, linear, over_batch, rms_norm, rotate


def output(w, x_BTD, s, *, positions=None, padding=None, documents=None):
    return over_batch(_row, w, x_BTD, s, positions, padding, documents)


def _width(s):
    given = getattr(s, "latent_dim", None)
    return 2 * s.head_dim if given is None else given


def _frequencies(s):
    if s.rope_theta is None:
        return None
    turned = _width(s) if s.rotary_dim is None else s.rotary_dim
    return [s.rope_theta ** (-2.0 * i / turned) for i in range(turned // 2)]


def _token(w, x, s):
    """One token's H queries, its key and its value, none of them rotated."""
    C, H = _width(s), s.num_heads
    flat = linear(w, "q_heads", linear(w, "q_down", x, s.projection), s.projection)
    key = linear(w, "k_proj", x, s.projection)
    if s.qk_norm == "width":
        flat = rms_norm(flat, w["q_norm.weight"], s.norm_eps)
    queries = [flat[h * C : (h + 1) * C] for h in range(H)]
    if s.qk_norm == "head":
        queries = [rms_norm(q, w["q_norm.weight"], s.norm_eps) for q in queries]
    if s.qk_norm is not None:
        key = rms_norm(key, w["k_norm.weight"], s.norm_eps)
    if "alpha.weight" in w:
        value = key + w["alpha.weight"] * linear(w, "v_proj", key, s.projection)
    else:
        value = linear(w, "v_proj", x, s.projection)
    return queries, key, value


def _row(w, x_TD, s, row: Row):
    scale = s.scale if s.scale is not None else 1 / math.sqrt(_width(s))
    frequencies = _frequencies(s)
    queries, keys, values = [], [], []
    for n in range(row.tokens):
        q, k, v = _token(w, x_TD[n], s)
        queries.append([rotate(head, row.positions[n], frequencies) for head in q])
        keys.append(rotate(k, row.positions[n], frequencies))
        values.append(v)
    rows = []
    for n in range(row.tokens):
        seen = [m for m in range(row.tokens) if row.sees(n, m)]
        heads = [attend(q, [keys[m] for m in seen], [values[m] for m in seen], s, scale, _width(s)) for q in queries[n]]
        rows.append(linear(w, "o_proj", torch.cat(heads), s.projection))
    return torch.stack(rows)
