"""The one softmax(Q K^T) V of the package: `attend`.

Softmax attention without dropout runs on a GPU by PyTorch's kernels ("sdpa", "flex": `headloom.ops.gpu`). Elsewhere,
and in float64, it is one operator where it has no soft-cap either, `headloom::scores`: a mask that lowers to pieces
runs as fused pieces ("fused"); padding, documents and given masks that do not run through the fused kernel in query
blocks with an additive mask ("masked"). Everything else runs in query blocks with materialised scores ("blocks",
`headloom.ops.blocks`). Which one ran is recorded (`paths`); nothing falls back silently.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from headloom.ops import blocks, fused, gpu, pieces
from headloom.ops.autograd import Context, Shape
from headloom.ops.masks import Visibility, expand_rows
from headloom.ops.pieces import Piece

_BIAS_ELEMENTS = 1 << 22  # of one query block's additive mask
_recording: list[Counter[str]] = []
_convention = "full"


@contextlib.contextmanager
def paths() -> Iterator[Counter[str]]:
    """Counts the score paths that run inside: {"fused": 8, "blocks": 2}."""
    counter: Counter[str] = Counter()
    _recording.append(counter)
    try:
        yield counter
    finally:
        _recording.remove(counter)


@contextlib.contextmanager
def flop_convention(name: str) -> Iterator[None]:
    """How a FlopCounterMode inside counts scores: "full" (all pairs) or "exact" (visible pairs); widths unpadded."""
    global _convention
    assert name in ("full", "exact"), name
    before, _convention = _convention, name
    try:
        yield
    finally:
        _convention = before


def convention() -> str:
    """The convention of the `flop_convention` around, for the formulas of other operators on pairs."""
    return _convention


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    visibility: Visibility,
    *,
    scale: float,
    rows_per_token: int = 1,
    rows_causal: bool = False,
    kind: str = "softmax",
    softcap: float | None = None,
    dropout: float = 0.0,
    on_logits: Callable[[Tensor], Tensor] | None = None,
    on_weights: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """softmax(scale q k^T + mask) v, (B, H, T, V).

    Query head h reads kv head h // (H // G). A row that sees no key is 0. `rows_per_token` = P: a token has P rows side
    by side in queries, keys and values, whose token axes are then T P and S P long. `rows_causal`: a row does not see
    the later rows of its own token. `kind`: "softmax", "identity" (scores as they are) or "hard" (equal weight on
    all maxima of a row). `softcap` c: scores become c tanh(scores / c). `dropout` acts on the weights.
    `on_logits` and `on_weights` act on all heads' scores (B, H, T, S) at once, a block of queries and keys at a time,
    for every (query, key) alone: on scaled logits before soft-cap, mask and softmax; on weights before dropout.
    """
    if 0 in q_BHTK.shape or 0 in k_BGSK.shape:
        return q_BHTK.new_zeros(*q_BHTK.shape[:3], v_BGSV.shape[-1])
    hooks = [hook for hook in (on_logits, on_weights) if hook is not None]
    capped = kind == "softmax" and dropout == 0.0 and not hooks
    plain = capped and softcap is None
    if capped and gpu.takes(q_BHTK) and (plain or not gpu.few(q_BHTK, k_BGSK)):
        out, path = gpu.attend(q_BHTK, k_BGSK, v_BGSV, visibility, scale, rows_per_token, rows_causal, softcap)
        record(path)
        return out
    if not plain and not q_BHTK.is_meta:  # on the meta device only shapes and operation counts matter
        record("blocks")
        return blocks.attend(
            q_BHTK,
            k_BGSK,
            v_BGSV,
            visibility,
            scale,
            rows_per_token,
            rows_causal,
            kind=kind,
            softcap=softcap,
            dropout=dropout,
            on_logits=on_logits,
            on_weights=on_weights,
        )
    lowered = pieces.lower(visibility, q_BHTK.shape[0], rows_per_token, rows_causal)
    record("masked" if lowered is None else "fused")
    rule = [
        visibility.T,
        visibility.S,
        int(visibility.causal),
        visibility.window or 0,
        rows_per_token,
        int(rows_causal),
    ]
    given = (None, None) if lowered is not None else (visibility.documents_BS, visibility.pairs_BTS)
    flat = [number for piece in lowered or () for number in piece]
    found: Tensor = torch.ops.headloom.scores(q_BHTK, k_BGSK, v_BGSV, *given, rule, flat, lowered is None, scale)[0]
    for hook in hooks:  # on the meta device: once on as many pairs as are counted
        hook(q_BHTK.new_empty(1, q_BHTK.shape[1], 1, _pairs(q_BHTK.shape, k_BGSK.shape, flat, lowered is None)))
    return found


def record(path: str) -> None:
    """Count a score path in every `paths` that is open."""
    for counter in _recording:
        counter[path] += 1


def _pieces(flat: Sequence[int]) -> list[Piece]:
    size = len(Piece._fields)
    return [Piece(*flat[i : i + size]) for i in range(0, len(flat), size)]


def _pad(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x


@torch.library.custom_op(
    "headloom::scores",
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? documents, Tensor? pairs, SymInt[] rule, SymInt[] pieces, "
    "bool masked, float scale) -> (Tensor, Tensor)",
)
def scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Merged output and log-sum-exp. Unequal widths are padded: the fused kernel wants one, and zeros add nothing.

    Sizes are SymInt: compiled, one graph then serves every length of a growing cache.
    """
    width, value_width = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    q, k, v = _pad(q, width), _pad(k, width), _pad(v, width)
    if masked:
        out = q.new_empty(q.shape[0], q.shape[2], q.shape[1], width).transpose(1, 2)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for rows, columns, bias in _masked_blocks(q, documents, pairs, rule):
            o, part = fused.rectangle(q[:, :, rows], k[:, :, columns], v[:, :, columns], False, bias, scale)
            out[:, :, rows], lse[:, :, rows] = o, part
    else:
        out, lse = fused.pieces_forward(q, k, v, _pieces(pieces), scale)
    # the fused kernel's (B, T, H, V) memory order is kept: the output projection reads it without a copy
    return out[..., :value_width].transpose(1, 2).contiguous().transpose(1, 2), lse.contiguous()


@scores.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    lse = q.new_empty(B, H, T, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(B, T, H, v.shape[-1]).transpose(1, 2), lse


@torch.library.custom_op(
    "headloom::scores_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? documents, Tensor? pairs, "
    "SymInt[] rule, SymInt[] pieces, bool masked, float scale) -> (Tensor, Tensor, Tensor)",
)
def scores_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, of the shapes of these, from the merged output and log-sum-exp."""
    key_width, value_width = q.shape[-1], v.shape[-1]
    width = max(key_width, value_width)
    grad, q, k, v, out = (_pad(x, width) for x in (grad, q, k, v, out))
    if masked:
        wide = torch.promote_types(q.dtype, torch.float32)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        for rows, columns, bias in _masked_blocks(q, documents, pairs, rule):
            grad_rows, q_rows, out_rows = (x[:, :, rows] for x in (grad, q, out))
            keys, values = k[:, :, columns], v[:, :, columns]
            grads = fused.rectangle_backward(
                grad_rows, q_rows, keys, values, out_rows, lse[:, :, rows], False, bias, scale
            )
            dq[:, :, rows] = grads[0]
            dk[:, :, columns] += grads[1]
            dv[:, :, columns] += grads[2]
    else:
        dq, dk, dv = fused.pieces_backward(grad, q, k, v, out, lse, _pieces(pieces), scale)
    widths = (key_width, key_width, value_width)
    dq, dk, dv = (
        d[..., :w].transpose(1, 2).to(q.dtype).contiguous().transpose(1, 2)
        for d, w in zip((dq, dk, dv), widths, strict=True)
    )
    return dq, dk, dv


@scores_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_rest: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, list[int], list[int], bool, float]


def _setup(ctx: Context, inputs: _Inputs, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, documents, pairs, rule, pieces, masked, scale = inputs
    ctx.save_for_backward(q, k, v, *output, documents, pairs)
    ctx.plain = (rule, pieces, masked, scale)


def _backward(ctx: Context, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, documents, pairs = ctx.saved_tensors
    grads = torch.ops.headloom.scores_backward(grad_out, q, k, v, out, lse, documents, pairs, *ctx.plain)
    return (*grads, None, None, None, None, None, None)


scores.register_autograd(_backward, setup_context=_setup)


def _masked_blocks(
    q: Tensor, documents: Tensor | None, pairs: Tensor | None, rule: Sequence[int]
) -> Iterator[tuple[slice, slice, Tensor]]:
    """(query rows, key columns, additive mask) of query blocks small enough that the mask stays small."""
    T, S, causal, window, P, rows_causal = rule
    visibility = Visibility(T, S, bool(causal), window or None, documents, pairs)
    tokens = max(1, _BIAS_ELEMENTS // max(1, q.shape[0] * S * P * P))
    for first in range(0, T, tokens):
        last = min(T, first + tokens)
        start = max(0, visibility.past + first - window + 1) if window else 0
        end = visibility.past + last if causal else S
        visible = visibility.dense(first, last, device=q.device)
        visible = expand_rows(visible, visibility.past + first, P, bool(rows_causal))[:, :, start * P : end * P]
        bias = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill_(~visible, -torch.inf)
        yield slice(first * P, last * P), slice(start * P, end * P), bias.unsqueeze(1)


def _pairs(q_shape: Shape, k_shape: Shape, flat: Sequence[int], masked: bool) -> int:
    """Counted (query, key) pairs of the batch, per head."""
    if _convention == "full" or masked:
        return q_shape[0] * q_shape[2] * k_shape[2]
    return sum(piece.pairs() for piece in _pieces(flat))


def _multiply_adds(q_shape: Shape, k_shape: Shape, v_shape: Shape, flat: Sequence[int], masked: bool) -> int:
    """Of the two score products: (query width + value width) per counted pair and head."""
    return _pairs(q_shape, k_shape, flat, masked) * q_shape[1] * (q_shape[-1] + v_shape[-1])


@register_flop_formula(torch.ops.headloom.scores)
def _flops(
    q: Shape,
    k: Shape,
    v: Shape,
    documents: Shape | None,
    pairs: Shape | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
    **_: object,
) -> int:
    return 2 * _multiply_adds(q, k, v, pieces, masked)


@register_flop_formula(torch.ops.headloom.scores_backward)
def _backward_flops(
    grad: Shape,
    q: Shape,
    k: Shape,
    v: Shape,
    out: Shape,
    lse: Shape,
    documents: Shape | None,
    pairs: Shape | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
    **_: object,
) -> int:
    return 4 * _multiply_adds(q, k, v, pieces, masked)
