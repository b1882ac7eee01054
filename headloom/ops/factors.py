"""Scores over keys and values that are given by factors and never expanded.

k_h[s] = (1/R) sum_r A[s,r,h] B[s,r]: then q_h . k_h[s] = (1/R) sum_r A[s,r,h] (q_h . B[s,r]), so all heads meet the
same R key heads; values likewise ("factors"). That is R times the products of expanded keys, so many queries that need
no gradient expand a block of keys at a time and merge by log-sum-exp ("factor blocks").
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headloom.ops import blocks, pieces, scores
from headloom.ops.masks import Visibility

_BLOCK_ELEMENTS = 1 << 24  # of one query block's products, all heads and ranks
_BLOCK_TOKENS = 1024  # of keys expanded at once, and of the queries that meet them
_FEW = 8  # queries up to which meeting the factors is faster than expanding them

Factors = tuple[Tensor, Tensor]  # A (B, R, S, H), B (B, R, S, K)


def attend(
    q_BHTK: Tensor,
    k: Factors,
    v: Factors,
    visibility: Visibility,
    scale: float,
    *,
    kind: str = "softmax",
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """As `headloom.ops.scores.attend` with k and v by their factors, (B, H, T, V)."""
    B, H, T, _ = q_BHTK.shape
    plain = kind == "softmax" and softcap is None and dropout == 0.0
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in (q_BHTK, *k, *v))
    if plain and T > _FEW and not learns:
        scores.record("factor blocks")
        starts = range(0, T, _BLOCK_TOKENS)
        return torch.cat([_by_keys(q_BHTK, k, v, visibility, i, min(T, i + _BLOCK_TOKENS), scale) for i in starts], 2)
    scores.record("factors")
    ranks = max(k[0].shape[1], v[0].shape[1])
    may_be_dead = visibility.documents_BS is not None or visibility.pairs_BTS is not None

    def block(q: Tensor, k_a: Tensor, k_b: Tensor, v_a: Tensor, v_b: Tensor, first: int, last: int) -> Tensor:
        start, end = visibility.reach(first, last)
        hidden = ~visibility.dense(first, last, device=q.device)[:, None, :, start:end]
        k_a, k_b, v_a, v_b = (x[:, :, start:end] for x in (k_a, k_b, v_a, v_b))
        logits = _logits(q[:, :, first:last], k_a, k_b) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        weights = blocks.normalise(logits, hidden, kind, may_be_dead)
        weights = F.dropout(weights, dropout) if dropout else weights
        return _values(weights, v_a, v_b).to(v_b.dtype)

    tokens = max(1, _BLOCK_ELEMENTS // max(1, B * H * ranks * visibility.S))
    if tokens >= T:
        return block(q_BHTK, *k, *v, 0, T)
    firsts = range(0, T, tokens)
    outs = [checkpoint(block, q_BHTK, *k, *v, i, min(T, i + tokens), use_reentrant=False) for i in firsts]
    return torch.cat(outs, dim=2)


def mean_product(a_BRSH: Tensor, b_BRSK: Tensor) -> Tensor:
    """(1/R) sum_r a[r, h] b[r], (B, H, S, K); (B, S, H, K) in memory."""
    return (a_BRSH.permute(0, 2, 3, 1) @ b_BRSK.transpose(1, 2)).transpose(1, 2) / a_BRSH.shape[1]


def _by_keys(q: Tensor, k: Factors, v: Factors, visibility: Visibility, first: int, last: int, scale: float) -> Tensor:
    """The query rows first..last over blocks of expanded keys."""
    q = q[:, :, first:last]
    B, H, T, _ = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(B, H, T, v[1].shape[-1], dtype=wide)
    lse = q.new_full((B, H, T), -torch.inf, dtype=wide)
    structure = visibility.window is None and visibility.documents_BS is None and visibility.pairs_BTS is None
    visible = None if structure else visibility.dense(first, last, device=q.device)
    start, reach = visibility.reach(first, last)
    own = visibility.past + first if structure and visibility.causal else reach  # from here on the mask is a triangle
    cuts = [*range(start, own, _BLOCK_TOKENS), *([own] if own < reach else []), reach]
    for begin, end in itertools.pairwise(cuts):
        pairs = None if visible is None else visible[:, :, begin:end]
        seen = Visibility(T, end - begin, structure and begin == own, None, None, pairs)
        keys, values = (mean_product(a[:, :, begin:end], b[:, :, begin:end]) for a, b in (k, v))
        part, new = _part(q, keys, values, seen, scale)
        total = torch.logaddexp(lse, new)
        safe = total.masked_fill(total == -torch.inf, 0)  # a row that has seen nothing yet
        out = out * (lse - safe).exp().unsqueeze(-1) + part.to(wide) * (new - safe).exp().unsqueeze(-1)
        lse = total
    return out.to(q.dtype)


def _part(q: Tensor, k: Tensor, v: Tensor, seen: Visibility, scale: float) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over some of the keys."""
    lowered = pieces.lower(seen, q.shape[0])
    rule = [seen.T, seen.S, int(seen.causal), 0, 1, 0]
    flat = [number for piece in lowered or () for number in piece]
    given = (None, seen.pairs_BTS, rule, flat, lowered is None, scale)
    found: tuple[Tensor, Tensor] = torch.ops.headloom.scores(q, k, v, *given)
    return found


def _logits(q_BHTK: Tensor, a_BRSH: Tensor, b_BRSK: Tensor) -> Tensor:
    """(B, H, T, S), in float32 at least."""
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    B, H, T, _ = q_BHTK.shape
    R, S = a_BRSH.shape[1:3]
    met = (q_BHTK.to(wide).reshape(B, 1, H * T, -1) @ b_BRSK.to(wide).transpose(-1, -2)).view(B, R, H, T, S)
    return (met * a_BRSH.to(wide).transpose(-1, -2).unsqueeze(3)).sum(1) / R


def _values(weights_BHTS: Tensor, a_BRSH: Tensor, b_BRSV: Tensor) -> Tensor:
    """(B, H, T, V) in the type of the weights."""
    B, H, T, _ = weights_BHTS.shape
    wide = weights_BHTS.dtype
    by_rank = weights_BHTS.unsqueeze(1) * a_BRSH.to(wide).transpose(-1, -2).unsqueeze(3)  # (B, R, H, T, S)
    return (by_rank.flatten(2, 3) @ b_BRSV.to(wide)).sum(1).view(B, H, T, -1) / a_BRSH.shape[1]
