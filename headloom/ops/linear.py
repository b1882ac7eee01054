"""Sums over visible keys without their scores: out_t = sum_j [t sees j] (q_t . k_j) v_j, in memory linear in T.

In chunks of c tokens: within a chunk by its c x c products, masked; everything before it by the chunks' states
sum_j k_j^T v_j (K, V), summed up from chunk to chunk. Documents need no state each: order within a document is all that
counts, so tokens are sorted by document, each then stands in one piece, and states are summed up within a piece.
Everything is in float32 at least.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from headloom.ops.masks import Visibility

_BLOCK_ELEMENTS = 1 << 24  # of one block's products, all heads


def attend(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, visibility: Visibility, chunk: int) -> Tensor:
    """The sums (B, H, T, V); query head h reads head h // (H // G) of k and v. What sees nothing is 0."""
    T, past = visibility.T, visibility.past
    pairs = visibility.window is not None or visibility.pairs_BTS is not None
    # an exported graph leaves lengths open: it has one block, and neither chunks nor blocks that follow from them
    if torch.compiler.is_exporting() or pairs or chunk >= T:
        return _blocks(q_BHTK, k_BGSK, v_BGSV, visibility)
    documents = visibility.documents_BS
    if documents is None and not visibility.causal:
        return _per_group(q_BHTK, k_BGSK.transpose(-1, -2) @ v_BGSV)
    q = F.pad(q_BHTK, (0, 0, past, 0))
    if documents is None:
        return _chunks(q, k_BGSK, v_BGSV, None, visibility.causal, chunk)[:, :, past:]
    documents, order = documents.sort(dim=1, stable=True)
    q, k, v = (x.gather(2, order[:, None, :, None].expand_as(x)) for x in (q, k_BGSK, v_BGSV))
    out = _chunks(q, k, v, documents, visibility.causal, chunk)
    back = order.argsort(1)[:, None, past:, None]
    return out.gather(2, back.expand(-1, out.shape[1], -1, out.shape[3]))


def products(q_BHTK: Tensor, k_BGSK: Tensor, visible_BTS: Tensor) -> Tensor:
    """q_t . k_j of the visible pairs, 0 elsewhere: (B, H, T, S)."""
    return _per_group(q_BHTK, k_BGSK.transpose(-1, -2)).masked_fill(~visible_BTS.unsqueeze(1), 0)


def _blocks(q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
    """Products of a block of queries with every key; several blocks are computed again in the backward."""
    T = visibility.T

    def block(q: Tensor, k: Tensor, v: Tensor, first: int, last: int) -> Tensor:
        visible = visibility.dense(first, last, device=q.device)
        return _per_group(products(q[:, :, first:last], k, visible), v)

    if torch.compiler.is_exporting():
        return block(q, k, v, 0, T)
    rows = max(1, _BLOCK_ELEMENTS // max(1, q.shape[0] * q.shape[1] * visibility.S))
    if rows >= T:
        return block(q, k, v, 0, T)
    parts = [checkpoint(block, q, k, v, i, min(T, i + rows), use_reentrant=False) for i in range(0, T, rows)]
    return torch.cat(parts, 2)


def _chunks(q_BHSK: Tensor, k_BGSK: Tensor, v_BGSV: Tensor, documents: Tensor | None, causal: bool, c: int) -> Tensor:
    """The sums for all S tokens; `documents` are sorted, and -1 sees and is seen by nothing."""
    B, H, S, _ = q_BHSK.shape
    G, end = k_BGSK.shape[1], -S % c
    q, k, v = (F.pad(x, (0, 0, 0, end)).unflatten(2, (-1, c)) for x in (q_BHSK, k_BGSK, v_BGSV))  # (B, heads, N, c, .)
    q = q.unflatten(1, (G, -1))  # (B, G, H/G, N, c, K)
    visible = torch.ones(c, c, dtype=torch.bool, device=q.device)
    visible = visible.tril() if causal else visible
    if documents is not None:
        documents = F.pad(documents, (0, end), value=-1).unflatten(1, (-1, c))  # (B, N, c)
        real = (documents >= 0)[:, None, :, :, None]
        k, v = k.masked_fill(~real, 0), v.masked_fill(~real, 0)
        visible = (visible & (documents[..., :, None] == documents[..., None, :]) & real[:, 0])[:, None, None]
    within = (q @ k.unsqueeze(2).transpose(-1, -2)).masked_fill(~visible, 0)
    out = within @ v.unsqueeze(2)
    if documents is None:
        out = out + q @ _before((k.transpose(-1, -2) @ v).cumsum(2)).unsqueeze(2)
    else:
        out = out + _carried(q, k, v, documents)
        if not causal:
            q, k, v = (x.flip(-3, -2) for x in (q, k, v))
            out = out + _carried(q, k, v, documents.flip(1, 2)).flip(-3, -2)
        out = out.masked_fill(~real.unsqueeze(1), 0)
    sums: Tensor = out.reshape(B, H, -1, out.shape[-1])[:, :, :S]
    return sums


def _carried(q: Tensor, k: Tensor, v: Tensor, documents_BNC: Tensor) -> Tensor:
    """What the chunks before give to the tokens of the document that reaches into a chunk, its first one."""
    first, last = documents_BNC[..., 0], documents_BNC[..., -1]
    ends = (documents_BNC == last[..., None])[:, None, :, :, None]
    state = k.masked_fill(~ends, 0).transpose(-1, -2) @ v  # (B, G, N, K, V) of the document a chunk ends with
    step = 1
    while step < state.shape[2]:  # the sum over a run of chunks that end with one document, doubled at each step
        same = (last[:, step:] == last[:, :-step])[:, None, :, None, None]
        more = torch.where(same, state[:, :, :-step], 0)
        state = state + F.pad(more, (0, 0, 0, 0, step, 0))
        step *= 2
    enters = F.pad(first[:, 1:] == last[:, :-1], (1, 0))[..., None] & (documents_BNC == first[..., None])
    given = q @ _before(state).unsqueeze(2)
    return given.masked_fill(~enters[:, None, None, :, :, None], 0)


def _before(x_BGNKV: Tensor) -> Tensor:
    """Each chunk's predecessor, 0 before the first."""
    return F.pad(x_BGNKV[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _per_group(x_BHTS: Tensor, y_BGSV: Tensor) -> Tensor:
    """x_h y_{h // (H // G)} without expanding y."""
    B, H, T, S = x_BHTS.shape
    G = y_BGSV.shape[1]
    return (x_BHTS.reshape(B, G, H // G, T, S) @ y_BGSV.unsqueeze(2)).reshape(B, H, T, -1)
