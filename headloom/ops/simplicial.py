"""2-simplicial scores: a softmax over pairs of keys, o_i = sum_jk softmax(scale sum_l q_il k1_jl k2_kl) (v1_j * v2_k).

The second key k stands at an offset d = i - k within a short window. For one offset the logits over j are those of
plain attention with the query q_i * k2_{i-d}, so each offset is one pass of fused attention over k1, v1, times
v2_{i-d}; the passes merge by their log-sum-exp. Several offsets share a call as further heads. The backward hands each
pass the merged log-sum-exp and dot(grad, out), which enters as one more feature: of the gradient 1, of the output the
dot product, of the values 0. Memory is that of a few passes, O(T), and nothing of T x T (or T^3) exists.

Dropout, soft-cap and other normalisations run in query blocks with materialised scores (rows, offsets, keys).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import register_flop_formula

from headloom.ops import blocks, pieces, scores
from headloom.ops.autograd import Context, Shape
from headloom.ops.masks import Visibility

PASS_ELEMENTS = 1 << 22  # of the queries of one call
BLOCK_ELEMENTS = 1 << 24  # of the materialised scores of one query block


def attend(
    q_BHTK: Tensor,
    k1_BGSK: Tensor,
    k2_BGSK: Tensor,
    v1_BGSV: Tensor,
    v2_BGSV: Tensor,
    visibility: Visibility,
    *,
    second: int,
    scale: float,
    kind: str = "softmax",
    softcap: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """(B, H, T, V). `visibility` is that of the first key; the second must be visible too, and closer than `second`.

    `second` is at most the visibility's window, so that a row with a second key has a first one. Query head h reads kv
    head h // (H // G). A row that sees nothing is 0. `kind`, `softcap`, `dropout` as in `headloom.ops.scores.attend`.
    """
    values = (q_BHTK, k1_BGSK, k2_BGSK, v1_BGSV, v2_BGSV)
    if 0 in q_BHTK.shape or 0 in k1_BGSK.shape:
        return q_BHTK.new_zeros(*q_BHTK.shape[:3], v1_BGSV.shape[-1])
    if (kind != "softmax" or softcap is not None or dropout) and not q_BHTK.is_meta:
        scores.record("blocks")
        return _blockwise(*values, visibility, second, scale, kind, softcap, dropout)
    lowered = pieces.lower(visibility, q_BHTK.shape[0])
    scores.record("masked" if lowered is None else "fused")
    rule = [visibility.T, visibility.S, int(visibility.causal), visibility.window or 0, second]
    flat = [number for piece in lowered or () for number in piece]
    given = (visibility.documents_BS, visibility.pairs_BTS, rule, flat, lowered is None, scale)
    out: Tensor = torch.ops.headloom.simplicial(*values, *given)[0]
    return out


def offsets(T: int, S: int, causal: bool, second: int) -> range:
    """The distances i - k that occur."""
    return range(0 if causal else -(min(second, S) - 1), min(second, S))


# Fused passes --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class _Passes:
    """The calls of one operator: what they share, and chunks of offsets."""

    q: Tensor  # (B, G, r, 1, T, K), in float32 at least
    k1: Tensor
    v1: Tensor
    k2: Tensor
    v2: Tensor
    visibility: Visibility
    arguments: tuple[Tensor | None, Tensor | None, list[int], list[int], bool, float]
    distances: range

    @classmethod
    def of(
        cls,
        q: Tensor,
        k1: Tensor,
        k2: Tensor,
        v1: Tensor,
        v2: Tensor,
        documents: Tensor | None,
        pairs: Tensor | None,
        rule: list[int],
        flat: list[int],
        masked: bool,
        scale: float,
    ) -> _Passes:
        T, S, causal, window, second = rule
        wide = torch.promote_types(q.dtype, torch.float32)
        grouped = q.to(wide).unflatten(1, (k1.shape[1], -1)).unsqueeze(3)
        visibility = Visibility(T, S, bool(causal), window or None, documents, pairs)
        given = (documents, pairs) if masked else (None, None)
        arguments = (*given, [T, S, causal, window, 1, 0], flat, masked, scale)
        k1, v1, k2, v2 = (x.to(wide) for x in (k1, v1, k2, v2))
        return cls(grouped, k1, v1, k2, v2, visibility, arguments, offsets(T, S, bool(causal), second))

    def chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """(places of the second key in S (c, T), where it is seen (B or 1, 1, 1, c, T)) for c offsets at a time."""
        each = self.q.numel() // self.q.shape[-1] * max(self.q.shape[-1], self.v1.shape[-1])
        size = max(1, PASS_ELEMENTS // max(1, each))
        for i in range(0, len(self.distances), size):
            yield second_keys(self.visibility, self.distances[i : i + size], device=self.q.device)

    def run(self, places: Tensor, seen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The queries (B, G, r, c, T, K) of c offsets, their outputs over v1, and log-sum-exps (-inf: not seen)."""
        queries = self.q * at(self.k2, places)
        out, lse = torch.ops.headloom.scores(queries.flatten(1, 3), self.k1, self.v1, *self.arguments)
        shape = queries.shape[1:4]
        return queries, out.unflatten(1, shape), lse.unflatten(1, shape).masked_fill(~seen, -torch.inf)


def second_keys(
    visibility: Visibility, distances: range, first: int = 0, last: int | None = None, *, device: torch.device
) -> tuple[Tensor, Tensor]:
    """For the query rows first..last and each distance: the key's place (c, rows), kept within S, and whether it is
    seen (B or 1, 1, 1, c, rows)."""
    last = visibility.T if last is None else last
    past, S = visibility.past, visibility.S
    query = torch.arange(past + first, past + last, device=device)
    key = query - torch.tensor(list(distances), device=device)[:, None]
    seen = ((key >= 0) & (key < S))[None]
    key = key.clamp(0, S - 1)
    if visibility.documents_BS is not None:
        document = visibility.documents_BS[:, None, past + first : past + last]
        seen = seen & (visibility.documents_BS[:, key] == document) & (document >= 0)
    if visibility.pairs_BTS is not None:
        rows = torch.arange(first, last, device=device)
        seen = seen & visibility.pairs_BTS[:, rows, key]
    return key, seen[:, None, None]


def at(x_BGSK: Tensor, places: Tensor) -> Tensor:
    """(B, G, 1, c, rows, K): x at the second keys' places."""
    return x_BGSK[:, :, None, places]


def _add_at(total_BGSK: Tensor, places: Tensor, x: Tensor) -> None:
    """Add (B, G, r, c, T, K), summed over r, at the second keys' places."""
    total_BGSK.index_add_(2, places.flatten(), x.sum(2).flatten(2, 3))


_SCHEMA = (
    "Tensor q, Tensor k1, Tensor k2, Tensor v1, Tensor v2, {}Tensor? documents, Tensor? pairs, SymInt[] rule, "
    "int[] pieces, bool masked, float scale"
)


@torch.library.custom_op("headloom::simplicial", mutates_args=(), schema=f"({_SCHEMA.format('')}) -> (Tensor, Tensor)")
def simplicial(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Output, and the merged log-sum-exp in float32 at least (-inf: the row sees nothing)."""
    passes = _Passes.of(q, k1, k2, v1, v2, documents, pairs, rule, pieces, masked, scale)
    B, G, r, _, T, _ = passes.q.shape
    total = passes.q.new_zeros(B, G, r, T, v1.shape[-1])
    lse = passes.q.new_full((B, G, r, T), -torch.inf)
    for places, seen in passes.chunks():
        _, out, part = passes.run(places, seen)
        merged = torch.logaddexp(lse, part.logsumexp(3))
        finite = merged.masked_fill(merged == -torch.inf, 0)
        share = (part - finite.unsqueeze(3)).exp().unsqueeze(-1)
        total = total * (lse - finite).exp().unsqueeze(-1) + (share * out * at(passes.v2, places)).sum(3)
        lse = merged
    # (B, T, H, V) in memory, as the output projection reads it
    return total.flatten(1, 2).transpose(1, 2).to(q.dtype).contiguous().transpose(1, 2), lse.flatten(1, 2)


@simplicial.register_fake
def _(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, *_rest: object) -> tuple[Tensor, Tensor]:
    B, H, T, _ = q.shape
    lse = q.new_empty(B, H, T, dtype=torch.promote_types(q.dtype, torch.float32))
    return q.new_empty(B, T, H, v1.shape[-1]).transpose(1, 2), lse


@torch.library.custom_op(
    "headloom::simplicial_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {_SCHEMA.format('Tensor out, Tensor lse, ')}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def simplicial_backward(
    grad: Tensor,
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    pairs: Tensor | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of q, k1, k2, v1 and v2, of the shapes of these."""
    passes = _Passes.of(q, k1, k2, v1, v2, documents, pairs, rule, pieces, masked, scale)
    B, G, r, _, T, _ = passes.q.shape
    wide, V = passes.q.dtype, v1.shape[-1]
    grad = grad.to(wide).reshape(B, G, r, 1, T, V)
    dot = (grad * out.to(wide).reshape(B, G, r, 1, T, V)).sum(-1, keepdim=True)
    lse = lse.reshape(B, G, r, 1, T)
    values = F.pad(passes.v1, (0, 1))
    dq = torch.zeros_like(passes.q)
    dk1, dk2, dv1, dv2 = (x.new_zeros(x.shape) for x in (passes.k1, passes.k2, passes.v1, passes.v2))
    for places, seen in passes.chunks():
        queries, part, part_lse = passes.run(places, seen)
        final = lse.expand_as(part_lse).masked_fill(~seen, torch.inf)  # what is not seen then weighs 0
        share = (part_lse - final.masked_fill(final == -torch.inf, 0)).exp().unsqueeze(-1)
        _add_at(dv2, places, grad * share * part)
        above = F.pad(grad * at(passes.v2, places), (0, 1), value=1.0)
        beside = F.pad(dot.expand(*above.shape[:-1], 1), (V, 0))
        folded = (x.flatten(1, 3) for x in (above, queries))
        grads = torch.ops.headloom.scores_backward(
            *folded, passes.k1, values, beside.flatten(1, 3), final.flatten(1, 3).contiguous(), *passes.arguments
        )
        turned = grads[0].unflatten(1, queries.shape[1:4])
        dq += (turned * at(passes.k2, places)).sum(3, keepdim=True)
        _add_at(dk2, places, turned * passes.q)
        dk1 += grads[1]
        dv1 += grads[2][..., :V]
    found = (dq.squeeze(3).flatten(1, 2), dk1, dk2, dv1, dv2)
    return tuple(x.to(like.dtype).contiguous() for x, like in zip(found, (q, k1, k2, v1, v2), strict=True))


@simplicial_backward.register_fake
def _(grad: Tensor, q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, *_rest: object) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k1, k2, v1, v2))


_Values = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
_Inputs = tuple[*_Values, Tensor | None, Tensor | None, list[int], list[int], bool, float]


def _setup(ctx: Context, inputs: _Inputs, output: tuple[Tensor, Tensor]) -> None:
    q, k1, k2, v1, v2, documents, pairs, rule, pieces, masked, scale = inputs
    ctx.save_for_backward(q, k1, k2, v1, v2, *output, documents, pairs)
    ctx.plain = (rule, pieces, masked, scale)


def _backward(ctx: Context, grad_out: Tensor, grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    grads = torch.ops.headloom.simplicial_backward(grad_out, *ctx.saved_tensors, *ctx.plain)
    return (*grads, None, None, None, None, None, None)


simplicial.register_autograd(_backward, setup_context=_setup)


def triples(rule: Sequence[int], convention: str) -> int:
    """(query, first key, second key) triples: all of the offsets that occur ("full"), or the visible ones."""
    T, S, causal, window, second = rule
    if convention == "full":
        return T * S * len(offsets(T, S, bool(causal), second))

    def keys(i: int, width: int) -> int:
        return min(i + 1, width) + (0 if causal else min(S - 1 - i, width - 1))

    return sum(keys(i, window or S) * keys(i, second) for i in range(S - T, S))


def _multiply_adds(q_shape: Shape, v1_shape: Shape, rule: Sequence[int]) -> int:
    """(query width + value width) per triple and head; products of q with k2 and of outputs with v2 are no matmuls."""
    return q_shape[0] * q_shape[1] * triples(rule, scores.convention()) * (q_shape[-1] + v1_shape[-1])


@register_flop_formula(torch.ops.headloom.simplicial)
def _flops(
    q: Shape,
    k1: Shape,
    k2: Shape,
    v1: Shape,
    v2: Shape,
    documents: Shape | None,
    pairs: Shape | None,
    rule: list[int],
    pieces: list[int],
    masked: bool,
    scale: float,
    **_: object,
) -> int:
    return 2 * _multiply_adds(q, v1, rule)


@register_flop_formula(torch.ops.headloom.simplicial_backward)
def _backward_flops(
    grad: Shape,
    q: Shape,
    k1: Shape,
    k2: Shape,
    v1: Shape,
    v2: Shape,
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
    return 4 * _multiply_adds(q, v1, rule)


# Query blocks --------------------------------------------------------------------------------------------------------


def weigh(
    q_BHTK: Tensor,
    k1_BGSK: Tensor,
    k2_BGSK: Tensor,
    visibility: Visibility,
    second: int,
    scale: float,
    *,
    kind: str = "softmax",
    softcap: float | None = None,
    first: int = 0,
    last: int | None = None,
) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Joint weights (B, G, r, c, rows, columns) of the query rows first..last over c offsets of the second key and the
    first keys start..end; the second keys' places (c, rows); and (start, end)."""
    last = visibility.T if last is None else last
    wide = torch.promote_types(q_BHTK.dtype, torch.float32)
    start, end = visibility.reach(first, last)
    distances = offsets(visibility.T, visibility.S, visibility.causal, second)
    places, seen = second_keys(visibility, distances, first, last, device=q_BHTK.device)
    q = q_BHTK[:, :, first:last].to(wide).unflatten(1, (k1_BGSK.shape[1], -1)).unsqueeze(3)
    keys = k1_BGSK[:, :, None, None, start:end].to(wide).transpose(-1, -2)
    logits = q * scale * at(k2_BGSK.to(wide), places) @ keys
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    visible = visibility.dense(first, last, device=q.device)[:, None, None, None, :, start:end] & seen.unsqueeze(-1)
    joint, hidden = (x.movedim(3, 4).flatten(-2) for x in (logits, ~visible))  # (B, G, r, rows, c columns)
    weights = blocks.normalise(joint, hidden, kind, True).unflatten(-1, (len(distances), end - start))
    return weights.movedim(4, 3), places, (start, end)


def _blockwise(
    q: Tensor,
    k1: Tensor,
    k2: Tensor,
    v1: Tensor,
    v2: Tensor,
    visibility: Visibility,
    second: int,
    scale: float,
    kind: str,
    softcap: float | None,
    dropout: float,
) -> Tensor:
    """As `attend`; several blocks are recomputed in the backward, so memory stays one block's."""
    T, S = visibility.T, visibility.S
    distances = len(offsets(T, S, visibility.causal, second))
    columns = S if visibility.window is None else min(S, 3 * visibility.window)
    rows = max(1, BLOCK_ELEMENTS // (q.shape[0] * q.shape[1] * distances * columns))
    if visibility.window is not None:
        rows = min(rows, visibility.window)

    def block(q: Tensor, k1: Tensor, k2: Tensor, v1: Tensor, v2: Tensor, first: int, last: int) -> Tensor:
        weights, places, (start, end) = weigh(
            q, k1, k2, visibility, second, scale, kind=kind, softcap=softcap, first=first, last=last
        )
        weights = F.dropout(weights, dropout) if dropout else weights
        out = weights.to(v1.dtype) @ v1[:, :, None, None, start:end]
        return (out * at(v2, places)).sum(3).flatten(1, 2)

    if rows >= T:
        return block(q, k1, k2, v1, v2, 0, T)
    firsts = range(0, T, rows)
    return torch.cat(
        [checkpoint(block, q, k1, k2, v1, v2, i, min(T, i + rows), use_reentrant=False) for i in firsts], 2
    )
