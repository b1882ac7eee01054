"""Scores of mixed heads against what is mixed: a few queries over a long cache.

q . (sum_g mix[g] k_g) = sum_g (mix[g] q) . k_g, and sum_s a_s (sum_g mix[g] v_gs) = sum_g mix[g] (sum_s a_s v_gs):
the mixes go into the queries and out of the sums, and the P H mixed heads of a remembered token are never written.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from headloom.ops import blocks
from headloom.ops.masks import Visibility
from headloom.ops.mixing import own_width
from headloom.ops.scores import record


def attend(
    q_BHTPQK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    k_mix_HPG: Tensor,
    v_mix_HPG: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    rows_causal: bool,
    kind: str,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """Attention of P queries per token over the P mixed keys of every key token, (B, H, T P, V).

    q: query p of a token as the key p' of another meets it (the turn of the key taken from the query), axes
    (B, H, T, p, p', K). rows_causal: query p does not see its own token's keys p' > p.
    """
    record("absorbed")
    B, H, T, P = q_BHTPQK.shape[:4]
    S = k_BGSK.shape[2]
    wide = torch.promote_types(q_BHTPQK.dtype, torch.float32)
    with own_width(q_BHTPQK):
        mix = k_mix_HPG.to(wide).permute(2, 0, 1)[:, :, None, None, :, None]  # (G, H, 1, 1, p', 1)
        q = (q_BHTPQK.to(wide).unsqueeze(1) * mix * scale).flatten(2, 5)  # (B, G, H T P P, K)
        logits = (q @ k_BGSK.to(wide).transpose(-1, -2)).sum(1).view(B, H, T, P, P, S)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        hidden = ~visibility.dense(device=q.device)[:, None, :, None, None, :]
        if rows_causal:  # one's own token, the last but T - 1 - t, has keys that come later
            later = torch.ones(P, P, dtype=torch.bool, device=q.device).triu(1)[:, :, None]
            own = torch.eye(T, S, dtype=torch.bool, device=q.device).roll(S - T, 1)[:, None, None]
            hidden = hidden | (later & own)
        hidden = hidden.expand(-1, -1, -1, P, P, -1)
        weights = blocks.normalise(logits.flatten(4), hidden.flatten(4), kind, True)
        weights = F.dropout(weights, dropout) if dropout else weights
        sums = weights.view(B, 1, H * T * P * P, S) @ v_BGSV.to(wide)
        out = torch.einsum("bghtpqv,hqg->bhtpv", sums.unflatten(2, (H, T, P, P)), v_mix_HPG.to(wide))
    return out.flatten(2, 3).to(v_BGSV.dtype)
