"""One rectangle of softmax attention, and pieces of it merged by their log-sum-exp.

On CPU a rectangle is PyTorch's fused attention (the ATen operator under `scaled_dot_product_attention`: no scores in
memory, forward and backward); elsewhere, and for rectangles too small for a kernel, plain matrix products. As in ring
attention, the backward of every piece is given the MERGED output and log-sum-exp: its softmax weights are then the
final ones, and gradients simply add up.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from headloom.ops.pieces import BAND, CAUSAL, Piece

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
RESULTS = 1 << 19  # elements of one call and thread, so that little is held beside the result; more calls cost time
GRADIENTS = 1 << 17  # the gradients of one call, which are then added to the others'
TILE = 512, 512  # rows and columns of a rectangle that a backward does at once, for the same reason
SMALL = 16  # rows and columns up to which a rectangle is done by plain products: a kernel's set-up would dominate


def _direct(q_BHTK: Tensor, k_BGSK: Tensor) -> bool:
    return not q_BHTK.is_cpu or max(q_BHTK.shape[2], k_BGSK.shape[2]) <= SMALL


def _weights(
    q_BHTK: Tensor, k_BGSK: Tensor, lse_BHT: Tensor | None, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, torch.dtype]:
    """exp(logits - lse) and lse, in float32 at least; kv heads are read by groups without expansion."""
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    B, H, T, _ = q_BHTK.shape
    G, S = k_BGSK.shape[1:3]
    q = q_BHTK.to(wide).reshape(B, G, H // G, T, -1)
    logits = (q @ k_BGSK.to(wide).unsqueeze(2).transpose(-1, -2)) * scale
    if causal:
        logits = logits.masked_fill(torch.ones(T, S, dtype=torch.bool, device=q.device).triu(1), -torch.inf)
    if bias is not None:
        logits = logits + bias.unsqueeze(2)
    if lse_BHT is None:
        lse = torch.logsumexp(logits, -1)
    else:
        lse = lse_BHT.reshape(B, G, H // G, T)
    finite = torch.where(lse == -torch.inf, 0, lse)  # a row that sees nothing: weights 0, not NaN
    return (logits - finite.unsqueeze(-1)).exp(), lse.reshape(B, H, T), wide


def rectangle(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """(out, lse) of one rectangle; causal is aligned at the top left. lse is float32 at least."""
    if not _direct(q_BHTK, k_BGSK):
        found: tuple[Tensor, Tensor] = _FORWARD(q_BHTK, k_BGSK, v_BGSK, 0.0, causal, attn_mask=bias, scale=scale)
        return found
    weights, lse, wide = _weights(q_BHTK, k_BGSK, None, causal, bias, scale)
    out = weights @ v_BGSK.to(wide).unsqueeze(2)
    return out.reshape(*q_BHTK.shape[:3], -1).to(q_BHTK.dtype), lse


def rectangle_backward(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    causal: bool,
    bias: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through one rectangle whose rows' final output and log-sum-exp are given.

    In float32 at least: the fused kernel adds up the gradients of keys over queries and heads in the type it is given.
    """
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    grad, q, k, v, out = (x.to(wide) for x in (grad_BHTK, q_BHTK, k_BGSK, v_BGSK, out_BHTK))
    if not _direct(q, k):
        bias = None if bias is None else bias.to(wide)
        given = (grad, q, k, v, out, lse_BHT, 0.0, causal)
        grads: tuple[Tensor, Tensor, Tensor] = _BACKWARD(*given, attn_mask=bias, scale=scale)
        return grads
    weights, _, _ = _weights(q, k, lse_BHT, causal, bias, scale)
    B, H, T, K = q.shape
    G = k.shape[1]
    grad, out, q = (x.reshape(B, G, H // G, T, K) for x in (grad, out, q))
    k, v = k.unsqueeze(2), v.unsqueeze(2)
    dv = (weights.transpose(-1, -2) @ grad).sum(2)
    dlogits = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    return (dlogits @ k).reshape(B, H, T, K), (dlogits.transpose(-1, -2) @ q).sum(2), dv


class _Part(NamedTuple):
    """Rectangles of a piece that are done in one call: `groups` from group `first` on, in the batch rows `batch`, of
    `heads` among the `kv_heads` key/value heads."""

    piece: Piece
    batch: range
    heads: range
    kv_heads: int
    first: int
    groups: int

    def of(self, x_BHTX: Tensor, start: int, size: int) -> Tensor:
        """`size` tokens from the piece's `start` on of every rectangle, a view (batches, groups, H, size, X)."""
        (_, heads, _, width), (batch, head, token, feature) = x_BHTX.shape, x_BHTX.stride()
        each, stride = heads // self.kv_heads, self.piece.stride
        offset = self.batch.start * batch + self.heads.start * each * head + (start + self.first * stride) * token
        return x_BHTX.as_strided(
            (len(self.batch), self.groups, len(self.heads) * each, size, width),
            (batch, stride * token, head, token, feature),
            x_BHTX.storage_offset() + offset,
        )

    def rows(self, x_BHTX: Tensor) -> Tensor:
        return self.of(x_BHTX, self.piece.query, self.piece.rows).flatten(0, 1)

    def columns(self, x_BHSX: Tensor) -> Tensor:
        return self.of(x_BHSX, self.piece.key, self.piece.columns).flatten(0, 1)

    def add_columns(self, total_BHSX: Tensor, part: Tensor) -> None:
        """Add to the columns, which neighbouring rectangles share where they are wider than `stride`."""
        piece, part = self.piece, part.unflatten(0, (-1, self.groups))
        if self.groups * piece.stride <= piece.columns:  # a few rectangles: one after another
            for i in range(self.groups):
                one = self._replace(first=self.first + i, groups=1)
                one.of(total_BHSX, piece.key, piece.columns).add_(part[:, i : i + 1])
            return
        for start in range(0, piece.columns, piece.stride):  # many: strips that they do not share
            size = min(piece.stride, piece.columns - start)
            self.of(total_BHSX, piece.key + start, size).add_(part[..., start : start + size, :])


class _Shown(NamedTuple):
    """What every rectangle of a piece shows: causality, or an additive mask and the rows to which it shows nothing."""

    causal: bool
    bias: Tensor | None = None
    blind: Tensor | None = None

    @classmethod
    def by(cls, piece: Piece, x: Tensor) -> _Shown:
        if piece.kind != BAND:
            return cls(piece.kind == CAUSAL)
        hidden = ~piece.visible(x.device)
        bias = x.new_zeros(1, 1, *hidden.shape).masked_fill_(hidden, -torch.inf)
        blind = hidden.all(-1)
        return cls(False, bias, blind if bool(blind.any()) else None)


def _parts(piece: Piece, q_BHTK: Tensor, k_BGSK: Tensor, elements: int) -> Iterator[_Part]:
    """A piece in calls that hold few elements at once, but enough for every thread: heads, then groups, then rows."""
    (H, K), G = q_BHTK.shape[1::2], k_BGSK.shape[1]
    each = (piece.rows * (H // G) + 2 * piece.columns) * K
    threads = torch.get_num_threads()
    room = max(threads, elements * threads // each)
    heads = min(G, room)
    groups = max(1, min(piece.groups, room // heads))
    batches = max(1, min(piece.batches, room // (heads * groups)))  # a view of several rows' groups is a copy
    end = piece.batch + piece.batches
    for b, h, first in itertools.product(
        range(piece.batch, end, batches), range(0, G, heads), range(0, piece.groups, groups)
    ):
        rows = range(b, min(b + batches, end))
        yield _Part(piece, rows, range(h, min(h + heads, G)), G, first, min(groups, piece.groups - first))


def _whole(pieces: Sequence[Piece], q_BHTK: Tensor, k_BGSK: Tensor) -> bool:
    """Whether one rectangle without a mask is all there is."""
    covers = (0, q_BHTK.shape[0], 0, q_BHTK.shape[2], 0, k_BGSK.shape[2], 1)
    return len(pieces) == 1 and pieces[0].kind != BAND and covers == pieces[0][1:8]


def pieces_forward(
    q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pieces: Sequence[Piece], scale: float
) -> tuple[Tensor, Tensor]:
    """Merged (out, lse) of disjoint pieces; rows no piece touches have output 0 and lse -inf."""
    if _whole(pieces, q_BHTK, k_BGSK):
        return rectangle(q_BHTK, k_BGSK, v_BGSK, pieces[0].kind == CAUSAL, None, scale)
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    B, H, T, K = q_BHTK.shape
    # (B, T, H, K) in memory, as the fused kernel writes and the output projection reads
    out = q_BHTK.new_zeros(B, T, H, K, dtype=wide).transpose(1, 2)
    lse = q_BHTK.new_full((B, T, H), -torch.inf, dtype=wide).transpose(1, 2)
    for piece in pieces:
        causal, bias, blind = _Shown.by(piece, q_BHTK)
        first = _untouched(pieces, piece)
        for part in _parts(piece, q_BHTK, k_BGSK, RESULTS):
            o, new = rectangle(part.rows(q_BHTK), part.columns(k_BGSK), part.columns(v_BGSK), causal, bias, scale)
            if blind is not None:  # the kernel says 0 of a row that sees nothing
                new = new.masked_fill(blind, -torch.inf)
            out_rows = part.of(out, piece.query, piece.rows)
            lse_rows = part.of(lse.unsqueeze(-1), piece.query, piece.rows)
            o, new = o.unflatten(0, out_rows.shape[:2]), new.reshape(lse_rows.shape)
            if first:
                out_rows.copy_(o)
                lse_rows.copy_(new)
                continue
            total = torch.logaddexp(lse_rows, new)
            out_rows.mul_((lse_rows - total).exp_()).add_(o * (new - total).exp_())
            lse_rows.copy_(total)
    return out.to(q_BHTK.dtype), lse


def _untouched(pieces: Sequence[Piece], piece: Piece) -> bool:
    """Whether no earlier piece has rows of this one's."""
    end = piece.query + (piece.groups - 1) * piece.stride + piece.rows
    for other in pieces:
        if other is piece:
            break
        apart = other.query >= end or other.query + (other.groups - 1) * other.stride + other.rows <= piece.query
        if not apart and other.batch < piece.batch + piece.batches and piece.batch < other.batch + other.batches:
            return False
    return True


def pieces_backward(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    pieces: Sequence[Piece],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: every piece's backward with the merged output and log-sum-exp, added up.

    In float32 at least: half types are made wide a batch row and a few heads at a time.
    """
    tensors = (grad_BHTK, q_BHTK, k_BGSK, v_BGSK, out_BHTK)
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    if q_BHTK.dtype == wide and _whole(pieces, q_BHTK, k_BGSK):
        return rectangle_backward(*tensors, lse_BHT, pieces[0].kind == CAUSAL, None, scale)
    dq, dk, dv = (x.new_zeros(x.transpose(1, 2).shape).transpose(1, 2) for x in (q_BHTK, k_BGSK, v_BGSK))
    if q_BHTK.dtype == wide:
        _add_pieces((dq, dk, dv), *tensors, lse_BHT, pieces, scale)
        return dq, dk, dv
    G, heads = k_BGSK.shape[1], torch.get_num_threads()
    for b, first in itertools.product(range(q_BHTK.shape[0]), range(0, G, heads)):
        own = [p._replace(batch=0, batches=1) for p in pieces if p.batch <= b < p.batch + p.batches]

        def here(x: Tensor, b: int = b, first: int = first) -> Tensor:
            each = x.shape[1] // G
            return x[b : b + 1, first * each : (first + heads) * each]

        grad, q, k, v, out = (here(x).to(wide) for x in tensors)
        found = pieces_backward(grad, q, k, v, out, here(lse_BHT), own, scale)
        for total, part in zip((dq, dk, dv), found, strict=True):
            here(total).copy_(part)
    return dq, dk, dv


def _add_pieces(
    grads: Sequence[Tensor],
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    pieces: Sequence[Piece],
    scale: float,
) -> None:
    """Add every piece's gradients of q, k, v to `grads`, a few tiles at a time."""
    dq, dk, dv = grads
    for piece in itertools.chain.from_iterable(piece.cut(*TILE) for piece in pieces):
        causal, bias, _ = _Shown.by(piece, q_BHTK)
        for part in _parts(piece, q_BHTK, k_BGSK, GRADIENTS):
            grad, q, out = (part.rows(x) for x in (grad_BHTK, q_BHTK, out_BHTK))
            lse = part.rows(lse_BHT.unsqueeze(-1)).squeeze(-1)
            k, v = part.columns(k_BGSK), part.columns(v_BGSK)
            part_q, part_k, part_v = rectangle_backward(grad, q, k, v, out, lse, causal, bias, scale)
            view = part.of(dq, piece.query, piece.rows)
            view.add_(part_q.unflatten(0, view.shape[:2]))
            part.add_columns(dk, part_k)
            part.add_columns(dv, part_v)
            del part_q, part_k, part_v  # before the next ones are made
