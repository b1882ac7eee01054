"""Scores in query blocks, materialised one at a time: dropout, soft-cap, other normalisations, hooks, and maps."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headloom.ops.masks import Visibility, expand_rows

_BLOCK_ELEMENTS = 1 << 24  # of one block's scores, all heads
_NEAR_ELEMENTS = 1 << 21  # of one that stays in a processor's caches: on CPU twice as fast
_FEWEST_ROWS = 16  # not cut further for that

Hook = Callable[[Tensor], Tensor] | None


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    visibility: Visibility,
    scale: float,
    rows_per_token: int,
    rows_causal: bool,
    *,
    kind: str,
    softcap: float | None,
    dropout: float,
    on_logits: Hook = None,
    on_weights: Hook = None,
) -> Tensor:
    """As `headloom.ops.scores.attend`; several blocks are recomputed in the backward, so memory stays one block's."""
    P, T = rows_per_token, visibility.T
    may_be_dead = visibility.documents_BS is not None or visibility.pairs_BTS is not None

    def block(q: Tensor, k: Tensor, v: Tensor, first: int, last: int) -> Tensor:
        start, end = visibility.reach(first, last)
        rows, columns = slice(first * P, last * P), slice(start * P, end * P)
        visible = visibility.dense(first, last, device=q.device)
        visible = expand_rows(visible, visibility.past + first, P, rows_causal)[:, :, columns]
        weights = weigh(
            q[:, :, rows],
            k[:, :, columns],
            visible,
            scale,
            kind=kind,
            softcap=softcap,
            on_logits=on_logits,
            on_weights=on_weights,
            may_be_dead=may_be_dead,
        )
        return spread(weights, v[:, :, columns], dropout)

    if torch.compiler.is_exporting():  # how many blocks there are follows from lengths, which a graph leaves open
        return block(q_BHTK, k_BGSK, v_BGSV, 0, T)
    each = q_BHTK.shape[0] * q_BHTK.shape[1] * P * P
    tokens = _tokens(_BLOCK_ELEMENTS // each, visibility)
    if q_BHTK.device.type == "cpu":
        tokens = min(tokens, max(_FEWEST_ROWS, _tokens(_NEAR_ELEMENTS // each, visibility)))
    if tokens >= T:
        return block(q_BHTK, k_BGSK, v_BGSV, 0, T)
    # the largest block first: later ones fit where it was, while growing ones would leave the heap in pieces
    outs = [
        checkpoint(block, q_BHTK, k_BGSK, v_BGSV, i, min(T, i + tokens), use_reentrant=False)
        for i in reversed(range(0, T, tokens))
    ]
    return torch.cat(outs[::-1], dim=2)


def _tokens(room: int, visibility: Visibility) -> int:
    """Query tokens of a block with room for so many pairs of tokens; W rows in a window of W see at most 3 W keys."""
    tokens, window = room // visibility.S, visibility.window
    return max(1, tokens if window is None else max(tokens, min(window, room // (3 * window))))


def weigh(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    visible_BTS: Tensor,
    scale: float,
    *,
    kind: str,
    softcap: float | None,
    on_logits: Hook = None,
    on_weights: Hook = None,
    may_be_dead: bool = True,
) -> Tensor:
    """Attention weights (B, H, T, S) in float32 at least; rows that see nothing (if any `may_be_dead`) are 0."""
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    logits = _over_groups(q_BHTK.to(wide) * scale, k_BGSK.to(wide).transpose(-1, -2))
    if on_logits is not None:
        logits = on_logits(logits)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    weights = normalise(logits, ~visible_BTS.unsqueeze(1), kind, may_be_dead)
    return weights if on_weights is None else on_weights(weights)


def spread(weights_BHTS: Tensor, v_BGSV: Tensor, dropout: float = 0.0) -> Tensor:
    """The values summed by their weights, (B, H, T, V) in the values' type."""
    weights = F.dropout(weights_BHTS, dropout) if dropout else weights_BHTS
    return _over_groups(weights.to(v_BGSV.dtype), v_BGSV)


def normalise(logits: Tensor, hidden: Tensor, kind: str, may_be_dead: bool) -> Tensor:
    """Logits (..., keys) -> weights along the last axis: the softmax, the logits as they are ("identity"), or equal
    weight on the largest ("hard"). `hidden` keys weigh 0, and so does a row of them only, which there is only where
    `may_be_dead`."""
    if kind == "identity":
        return logits.masked_fill(hidden, 0)
    if kind == "hard":
        logits = logits.masked_fill(hidden, -torch.inf)
        top = (logits == logits.amax(-1, keepdim=True)) & ~hidden
        return top.to(logits.dtype) / top.sum(-1, keepdim=True).clamp(min=1)
    if not may_be_dead:
        return torch.softmax(logits.masked_fill(hidden, -torch.inf), -1)
    dead = hidden.all(-1, keepdim=True)
    return torch.softmax(logits.masked_fill(hidden & ~dead, -torch.inf), -1).masked_fill(dead, 0)


def _over_groups(x_BHTS: Tensor, y_BGSV: Tensor) -> Tensor:
    """x_h y_{h // (H // G)} without expanding y."""
    B, H, T, S = x_BHTS.shape
    G = y_BGSV.shape[1]
    return (x_BHTS.reshape(B, G, H // G, T, S) @ y_BGSV.unsqueeze(2)).reshape(B, H, T, -1)
