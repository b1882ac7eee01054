"""Multi-head Latent Attention, the plain form: every head's keys and values from the latent, then softmax attention."""

import torch

from oracles import gqa
from oracles.common import linear, rms_norm


def heads(w, x, s):
    """One token's q (H of K_r + K_n), k and v (H of K_r + K_n, H of V); features [rotary ; plain], not rotated."""
    if "q_down.weight" in w:
        narrow = rms_norm(linear(w, "q_down", x, s.projection), w["q_norm.weight"], s.norm_eps)
        q = linear(w, "q_up", narrow, s.projection)
    else:
        q = linear(w, "q_proj", x, s.projection)
    both = linear(w, "kv_down", x, s.projection)
    C, K_r, K_n, V = s.latent_dim, s.rotary_dim, s.plain_dim, s.value_dim
    latent = rms_norm(both[:C], w["kv_norm.weight"], s.norm_eps)
    shared = both[C : C + K_r]
    up = linear(w, "kv_up", latent, s.projection)
    queries, keys, values = [], [], []
    for h in range(s.num_heads):
        queries.append(q[h * (K_r + K_n) : (h + 1) * (K_r + K_n)])
        own = up[h * (K_n + V) : (h + 1) * (K_n + V)]
        keys.append(torch.cat([shared, own[:K_n]]))
        values.append(own[K_n:])
    return queries, keys, values


output = gqa.output
patterns = gqa.patterns
