"""The delta rule of attention over what came before: (I + diag(beta) P) U = V, solved by blocks of tokens.

P = softmax(scale K K^T) over the keys strictly before a token, so the matrix is unit lower triangular. Block b reads
the earlier blocks by one attention product and itself by a triangular solve,

    u_b = (I + diag(beta_b) P_bb)^-1 (v_b - beta_b * (P_b,<b u_<b)),

both under one log-sum-exp. The backward walks the blocks from the last: y = dL/dv solves the transposed system,
dL/dP = -beta y u^T, dL/dbeta = -y (P u). No T x T matrix exists, and no loop runs over tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from headloom.ops import fused, scores
from headloom.ops.autograd import Context, Shape
from headloom.ops.masks import Visibility

BLOCK = 128  # tokens of one triangular solve


def solve(k_BGSK: Tensor, v_BGSV: Tensor, beta_BGT: Tensor, visibility: Visibility, scale: float) -> Tensor:
    """u (B, G, T, V) of the last T of S tokens: u_t = v_t - beta_t sum_j softmax_j(scale k_t k_j) u_j.

    j runs over what t sees strictly before itself; a token that sees nothing there keeps u = v. The first S - T rows
    of `v` are the u of earlier tokens.
    """
    assert visibility.causal
    rule = [visibility.T, visibility.S, visibility.window or 0]
    given = (visibility.documents_BS, visibility.pairs_BTS, rule, scale)
    u: Tensor = torch.ops.headloom.delta(k_BGSK, v_BGSV, beta_BGT, *given)[0]
    return u


class _Block(NamedTuple):
    """Tokens `start` to `end` of S, rows `first` to `last` of T; the keys before them that may be seen begin at `low`.

    own: bool (B or 1, rows, rows), the keys within the block; bias: an additive mask on the keys low..start, or None
    where all are seen; blind: bool (B or 1, 1, rows), the rows that see none of those.
    """

    first: int
    last: int
    start: int
    end: int
    low: int
    own: Tensor
    bias: Tensor | None
    blind: Tensor | None


def _blocks(k: Tensor, documents: Tensor | None, pairs: Tensor | None, rule: list[int]) -> Iterator[_Block]:
    T, S, window = rule
    visibility = Visibility(T, S, True, window or None, documents, pairs)
    plain = documents is None and pairs is None
    for first in range(0, T, BLOCK):
        last = min(T, first + BLOCK)
        start, end = S - T + first, S - T + last
        low = max(0, start - window + 1) if window else 0
        own = torch.ones(1, last - first, last - first, dtype=torch.bool, device=k.device).tril(-1)
        bias = blind = None
        if window or not plain:
            visible = visibility.dense(first, last, device=k.device)
            own = own & visible[:, :, start:end]
            before = visible[:, None, :, low:start]
            bias = torch.zeros(before.shape, dtype=k.dtype, device=k.device).masked_fill_(~before, -torch.inf)
            blind = ~before.any(-1)
        yield _Block(first, last, start, end, low, own, bias, blind)


def _own_logits(k: Tensor, block: _Block, scale: float, wide: torch.dtype) -> tuple[Tensor, Tensor]:
    """The block's keys and their logits with each other, -inf where not strictly before or not seen."""
    keys = k[:, :, block.start : block.end].to(wide)
    return keys, (keys @ keys.transpose(-1, -2) * scale).masked_fill(~block.own.unsqueeze(1), -torch.inf)


def _system(beta: Tensor, weights: Tensor) -> Tensor:
    """I + diag(beta) P_bb, of which a unit triangular solve reads the part below the diagonal."""
    return beta.unsqueeze(-1) * weights


def _pad(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1]))


@torch.library.custom_op(
    "headloom::delta",
    mutates_args=(),
    schema="(Tensor k, Tensor v, Tensor beta, Tensor? documents, Tensor? pairs, SymInt[] rule, float scale) "
    "-> (Tensor, Tensor, Tensor)",
)
def delta(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """u, P u and the log-sum-exp of P's rows (0 where a row is empty)."""
    (T, S, _), V = rule, v.shape[-1]
    width = max(k.shape[-1], V)
    wide = torch.promote_types(k.dtype, torch.float32)
    k, u = _pad(k, width), _pad(v, width).clone()
    out = torch.empty(*beta.shape, width, dtype=wide, device=k.device)
    lse = torch.empty_like(beta, dtype=wide)
    for block in _blocks(k, documents, pairs, rule):
        here, rows = slice(block.start, block.end), slice(block.first, block.last)
        _, logits = _own_logits(k, block, scale, wide)
        total = torch.logsumexp(logits, -1)
        read = torch.zeros((), dtype=wide, device=k.device)
        if block.start > block.low:
            before = slice(block.low, block.start)
            read, part = fused.rectangle(k[:, :, here], k[:, :, before], u[:, :, before], False, block.bias, scale)
            read = read.to(wide)
            if block.blind is not None:
                part = part.masked_fill(block.blind, -torch.inf)
            total = torch.logaddexp(part.to(wide), total)
        total = total.masked_fill(total == -torch.inf, 0)
        if block.start > block.low:
            read = read * (part - total).exp().unsqueeze(-1)
        weights = (logits - total.unsqueeze(-1)).exp()
        b = beta[:, :, rows].to(wide)
        right = u[:, :, here].to(wide) - b.unsqueeze(-1) * read
        solved = torch.linalg.solve_triangular(_system(b, weights), right, upper=False, unitriangular=True)
        u[:, :, here] = solved.to(u.dtype)
        out[:, :, rows], lse[:, :, rows] = read + weights @ solved, total
    return u[:, :, S - T :, :V].contiguous(), out[..., :V].contiguous(), lse


@delta.register_fake
def _(
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.promote_types(k.dtype, torch.float32)
    u = v.new_empty(*v.shape[:2], rule[0], v.shape[-1])
    return u, torch.empty_like(u, dtype=wide), torch.empty_like(beta, dtype=wide)


@torch.library.custom_op(
    "headloom::delta_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor k, Tensor v, Tensor beta, Tensor u, Tensor out, Tensor lse, Tensor? documents, "
    "Tensor? pairs, SymInt[] rule, float scale) -> (Tensor, Tensor, Tensor)",
)
def delta_backward(
    grad: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    u: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of k, v and beta, of the shapes of these; blocks are undone from the last to the first."""
    past, K, V = rule[1] - rule[0], k.shape[-1], v.shape[-1]
    width, dtype = max(K, V), k.dtype
    wide = torch.promote_types(dtype, torch.float32)
    u = _pad(torch.cat((v[:, :, :past], u), 2), width)
    grad, k, out = (_pad(x, width) for x in (grad, k, out))
    dk = torch.zeros_like(k, dtype=wide, memory_format=torch.contiguous_format)
    dv = torch.zeros_like(u, dtype=wide)  # of u until a block's turn has come, then of v
    dv[:, :, past:] = grad
    dbeta = torch.empty(beta.shape, dtype=wide, device=k.device)
    for block in reversed(list(_blocks(k[:1, :1], documents, pairs, rule))):
        here, rows = slice(block.start, block.end), slice(block.first, block.last)
        keys, logits = _own_logits(k, block, scale, wide)
        weights = (logits - lse[:, :, rows].unsqueeze(-1)).exp()
        b, read, mine = beta[:, :, rows].to(wide), out[:, :, rows], u[:, :, here].to(wide)
        system = _system(b, weights).transpose(-1, -2)
        y = torch.linalg.solve_triangular(system, dv[:, :, here], upper=True, unitriangular=True)
        dv[:, :, here] = y
        dbeta[:, :, rows] = -(y * read).sum(-1)
        above = -b.unsqueeze(-1) * y  # the gradient of P u
        dlogits = weights * (above @ mine.transpose(-1, -2) - (above * read).sum(-1, keepdim=True)) * scale
        dk[:, :, here] += dlogits @ keys + dlogits.transpose(-1, -2) @ keys
        if block.start > block.low:
            before = slice(block.low, block.start)
            grads = fused.rectangle_backward(
                above, k[:, :, here], k[:, :, before], u[:, :, before], read, lse[:, :, rows],
                False, block.bias, scale,
            )  # fmt: skip
            dk[:, :, here] += grads[0]
            dk[:, :, before] += grads[1]
            dv[:, :, before] += grads[2]
    return dk[..., :K].to(dtype).contiguous(), dv[..., :V].to(v.dtype).contiguous(), dbeta.to(beta.dtype)


@delta_backward.register_fake
def _(grad: Tensor, k: Tensor, v: Tensor, beta: Tensor, *_rest: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (k, v, beta))


_Inputs = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, list[int], float]


def _setup(ctx: Context, inputs: _Inputs, output: tuple[Tensor, Tensor, Tensor]) -> None:
    k, v, beta, documents, pairs, rule, scale = inputs
    ctx.save_for_backward(k, v, beta, *output, documents, pairs)
    ctx.plain = (rule, scale)


def _backward(ctx: Context, grad_u: Tensor, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.headloom.delta_backward(grad_u, *ctx.saved_tensors, *ctx.plain)
    return (*grads, None, None, None, None)


delta.register_autograd(_backward, setup_context=_setup)


def _multiply_adds(k_shape: Shape, v_shape: Shape, rule: Sequence[int]) -> int:
    """(key width + value width) per pair and head: logits, and the products and solves that u costs."""
    T, S, window = rule
    if scores.convention() == "full":
        pairs = T * S
    else:
        pairs = sum(min(i, window - 1) if window else i for i in range(S - T, S))
    return k_shape[0] * k_shape[1] * pairs * (k_shape[-1] + v_shape[-1])


@register_flop_formula(torch.ops.headloom.delta)
def _flops(
    k: Shape,
    v: Shape,
    beta: Shape,
    documents: Shape | None,
    pairs: Shape | None,
    rule: list[int],
    scale: float,
    **_: object,
) -> int:
    return 2 * _multiply_adds(k, v, rule)


@register_flop_formula(torch.ops.headloom.delta_backward)
def _backward_flops(
    grad: Shape,
    k: Shape,
    v: Shape,
    beta: Shape,
    u: Shape,
    out: Shape,
    lse: Shape,
    documents: Shape | None,
    pairs: Shape | None,
    rule: list[int],
    scale: float,
    **_: object,
) -> int:
    return 4 * _multiply_adds(k, v, rule)
