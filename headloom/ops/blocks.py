"""Scores in query blocks, materialised one block at a time: dropout, soft-cap, other normalisations, and maps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headloom.ops.masks import Visibility, expand_pseudo

_BLOCK_ELEMENTS = 1 << 24  # of one block's scores, all heads


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    visibility: Visibility,
    scale: float,
    pseudo: int,
    virtual: bool,
    *,
    kind: str,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """As `headloom.ops.scores.attend`; several blocks are recomputed in the backward, so memory stays one block's."""
    B, H = q_BHTK.shape[:2]
    tokens = max(1, _BLOCK_ELEMENTS // (B * H * k_BGSK.shape[2] * pseudo))

    def block(q: Tensor, k: Tensor, v: Tensor, first: int, last: int) -> Tensor:
        visible = visibility.dense(first, last, device=q.device)
        visible = expand_pseudo(visible, visibility.past + first, pseudo, virtual)
        weights = weigh(q[:, :, first * pseudo : last * pseudo], k, visible, scale, kind=kind, softcap=softcap)
        weights = F.dropout(weights, dropout) if dropout else weights
        return _over_groups(weights.to(v.dtype), v)

    if tokens >= visibility.T:
        return block(q_BHTK, k_BGSK, v_BGSV, 0, visibility.T)
    firsts = range(0, visibility.T, tokens)
    outs = [
        checkpoint(block, q_BHTK, k_BGSK, v_BGSV, i, min(visibility.T, i + tokens), use_reentrant=False) for i in firsts
    ]
    return torch.cat(outs, dim=2)


def weigh(
    q_BHTK: Tensor, k_BGSK: Tensor, visible_BTS: Tensor, scale: float, *, kind: str, softcap: float | None
) -> Tensor:
    """Attention weights (B, H, T, S) in float32 at least; rows that see nothing are 0."""
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    logits = _over_groups(q_BHTK.to(wide), k_BGSK.to(wide).transpose(-1, -2)) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    hidden = ~visible_BTS.unsqueeze(1)
    if kind == "identity":
        return logits.masked_fill(hidden, 0)
    logits = logits.masked_fill(hidden, -torch.inf)
    if kind == "hard":
        top = (logits == logits.amax(-1, keepdim=True)) & ~hidden
        return top.to(wide) / top.sum(-1, keepdim=True).clamp(min=1)
    dead = hidden.all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(dead, 0), -1).masked_fill(hidden, 0)


def _over_groups(x_BHTS: Tensor, y_BGSV: Tensor) -> Tensor:
    """x_h y_{h // (H // G)} without expanding y."""
    B, H, T, S = x_BHTS.shape
    G = y_BGSV.shape[1]
    return (x_BHTS.reshape(B, G, H // G, T, S) @ y_BGSV.unsqueeze(2)).reshape(B, H, T, -1)
