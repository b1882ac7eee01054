"""One rectangle of softmax attention, and pieces of it merged by their log-sum-exp.

On CPU a rectangle is PyTorch's fused attention (the ATen operator under `scaled_dot_product_attention`: no scores in
memory, forward and backward); elsewhere, and for rectangles too small for a kernel, plain matrix products. As in ring
attention, the backward of every piece is given the MERGED output and log-sum-exp: its softmax weights are then the
final ones, and gradients simply add up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headloom.ops.pieces import ANTI, CAUSAL, FULL, Piece

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
SMALL = 16  # rows and columns up to which a rectangle is done by plain products: a kernel's set-up would dominate


def _direct(q_BHTK: Tensor, k_BGSK: Tensor) -> bool:
    return not q_BHTK.is_cpu or max(q_BHTK.shape[2], k_BGSK.shape[2]) <= SMALL


def _weights(q_BHTK: Tensor, k_BGSK: Tensor, lse_BHT: Tensor | None, causal: bool, bias: Tensor | None, scale: float):
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


def rectangle(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, causal: bool, bias: Tensor | None, scale: float):
    """(out, lse) of one rectangle; causal is aligned at the top left. lse is float32 at least."""
    if not _direct(q_BHTK, k_BGSK):
        return _FORWARD(q_BHTK, k_BGSK, v_BGSK, 0.0, causal, attn_mask=bias, scale=scale)
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
    """Gradients of q, k, v through one rectangle whose rows' final output and log-sum-exp are given."""
    if not _direct(q_BHTK, k_BGSK):
        return _BACKWARD(grad_BHTK, q_BHTK, k_BGSK, v_BGSK, out_BHTK, lse_BHT, 0.0, causal, attn_mask=bias, scale=scale)
    weights, _, wide = _weights(q_BHTK, k_BGSK, lse_BHT, causal, bias, scale)
    B, H, T, K = q_BHTK.shape
    G = k_BGSK.shape[1]
    grad = grad_BHTK.to(wide).reshape(B, G, H // G, T, K)
    out = out_BHTK.to(wide).reshape(B, G, H // G, T, K)
    k, v = k_BGSK.to(wide).unsqueeze(2), v_BGSK.to(wide).unsqueeze(2)
    q = q_BHTK.to(wide).reshape(B, G, H // G, T, K)
    dv = (weights.transpose(-1, -2) @ grad).sum(2)
    dlogits = weights * (grad @ v.transpose(-1, -2) - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (dlogits @ k).reshape(B, H, T, K)
    dk = (dlogits.transpose(-1, -2) @ q).sum(2)
    return dq.to(q_BHTK.dtype), dk.to(k_BGSK.dtype), dv.to(v_BGSK.dtype)


def _fold(x_BHTX: Tensor, piece: Piece, start: int, size: int) -> Tensor:
    """The piece's rectangles along the token axis as a view (batches, groups, inner, H, size, X)."""
    x = x_BHTX[piece.batch : piece.batch + piece.batches]
    span = (piece.inner - 1) * piece.inner_stride + size
    x = x[:, :, start : start + (piece.groups - 1) * piece.stride + span]
    x = x.unfold(2, span, piece.stride).unfold(-1, size, piece.inner_stride)  # (b, H, groups, X, inner, size)
    return x.permute(0, 2, 4, 1, 5, 3)


def _rows(x_BHTX: Tensor, piece: Piece, flip: bool) -> Tensor:
    out = _fold(x_BHTX, piece, piece.query, piece.rows).flatten(0, 2)
    return out.flip(2) if flip else out


def _columns(x_BHSX: Tensor, piece: Piece, flip: bool) -> Tensor:
    out = _fold(x_BHSX, piece, piece.key, piece.columns).flatten(0, 2)
    return out.flip(2) if flip else out


def _whole(piece: Piece, q_BHTK: Tensor, k_BGSK: Tensor) -> bool:
    covers = (0, q_BHTK.shape[0], 0, q_BHTK.shape[2], 0, k_BGSK.shape[2], 1, 1)
    return piece.kind != ANTI and covers == (*piece[1:8], piece.inner)


def pieces_forward(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, pieces: list[Piece], scale: float):
    """Merged (out, lse) of disjoint pieces; rows no piece touches have output 0 and lse -inf."""
    if len(pieces) == 1 and _whole(pieces[0], q_BHTK, k_BGSK):
        return rectangle(q_BHTK, k_BGSK, v_BGSK, pieces[0].kind == CAUSAL, None, scale)
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    B, H, T, K = q_BHTK.shape
    # (B, T, H, K) in memory, as the fused kernel writes and the output projection reads
    out = q_BHTK.new_zeros(B, T, H, K, dtype=wide).transpose(1, 2)
    lse = q_BHTK.new_full((B, T, H), -torch.inf, dtype=wide).transpose(1, 2)
    for piece in pieces:
        flip = piece.kind == ANTI
        q, k, v = _rows(q_BHTK, piece, flip), _columns(k_BGSK, piece, flip), _columns(v_BGSK, piece, flip)
        o, new = rectangle(q, k, v, piece.kind != FULL, None, scale)
        if flip:
            o, new = o.flip(2), new.flip(2)
        out_rows = _fold(out, piece, piece.query, piece.rows)
        lse_rows = _fold(lse.unsqueeze(-1), piece, piece.query, piece.rows)
        new = new.reshape(lse_rows.shape)
        total = torch.logaddexp(lse_rows, new)
        out_rows.mul_((lse_rows - total).exp_()).add_(o.reshape(out_rows.shape) * (new - total).exp_())
        lse_rows.copy_(total)
    return out.to(q_BHTK.dtype), lse


def pieces_backward(
    grad_BHTK: Tensor,
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSK: Tensor,
    out_BHTK: Tensor,
    lse_BHT: Tensor,
    pieces: list[Piece],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v: every piece's backward with the merged output and log-sum-exp, added up."""
    if len(pieces) == 1 and _whole(pieces[0], q_BHTK, k_BGSK):
        causal = pieces[0].kind == CAUSAL
        return rectangle_backward(grad_BHTK, q_BHTK, k_BGSK, v_BGSK, out_BHTK, lse_BHT, causal, None, scale)
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    sums = [x.new_zeros(x.shape[0], x.shape[2], x.shape[1], x.shape[3], dtype=wide).transpose(1, 2)
            for x in (q_BHTK, k_BGSK, v_BGSK)]  # fmt: skip
    for piece in pieces:
        flip = piece.kind == ANTI
        q, k, v = _rows(q_BHTK, piece, flip), _columns(k_BGSK, piece, flip), _columns(v_BGSK, piece, flip)
        grad, out = _rows(grad_BHTK, piece, flip), _rows(out_BHTK, piece, flip)
        lse = _rows(lse_BHT.unsqueeze(-1), piece, flip).squeeze(-1)
        grads = rectangle_backward(grad, q, k, v, out, lse, piece.kind != FULL, None, scale)
        for total, part, on_rows in zip(sums, grads, (True, False, False), strict=True):
            start, size = (piece.query, piece.rows) if on_rows else (piece.key, piece.columns)
            view = _fold(total, piece, start, size)
            view.add_((part.flip(2) if flip else part).reshape(view.shape))
    dq, dk, dv = (total.to(x.dtype) for total, x in zip(sums, (q_BHTK, k_BGSK, v_BGSK), strict=True))
    return dq, dk, dv
