"""Lowering a mask to a few rectangles that a fused kernel does without a mask.

A piece is `count` equal rectangles, `stride` apart on both axes, each FULL, CAUSAL (key column <= query row) or
ANTI (key column >= query row; causal after flipping both axes). Pieces of one lowering are disjoint and their union is
exactly what is visible, so their pairs add up to the exact operation count. Sizes are in pseudo-tokens.

Derivations, in tokens. Causality after a cache: a full rectangle and a causal square. A window of W, by blocks of W
queries: one's own block is causal (an encoder's is full); of the W - 1 keys before it, row q sees those from q - W + 1
on, an ANTI square; an encoder also sees, of the W - 1 keys after it, those up to q + W - 1, a CAUSAL square.
With P pseudo-tokens per token a triangle over whole tokens is the triangle over pseudo-tokens and, within each token
of the diagonal, the strict other triangle of P x P, which is again an ANTI or CAUSAL square, of P - 1.
"""

from __future__ import annotations

import functools
import itertools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from headloom.ops.masks import Visibility

FULL, CAUSAL, ANTI = 0, 1, 2
MOST_SEGMENTS = 64  # beyond it (many short documents in a batch), query blocks with an additive mask are faster


class Piece(NamedTuple):
    """`groups`, `stride` apart, of `inner` rectangles, `inner_stride` apart, in `batches` rows of the batch."""

    kind: int
    batch: int
    batches: int
    query: int
    rows: int
    key: int
    columns: int
    groups: int = 1
    stride: int = 1
    inner: int = 1
    inner_stride: int = 1

    def pairs(self) -> int:
        """Visible (query, key) pairs, per head."""
        each = self.rows * self.columns if self.kind == FULL else self.rows * (self.rows + 1) // 2
        return each * self.inner * self.groups * self.batches


class _Builder:
    """Collects pieces given in tokens, for one group of batch rows, with `pseudo` pseudo-tokens per token."""

    def __init__(self, batch: int, batches: int, pseudo: int, virtual: bool):
        self.batch, self.batches, self.pseudo, self.virtual = batch, batches, pseudo, virtual
        self.pieces: list[Piece] = []

    def full(self, query: int, rows: int, key: int, columns: int, count: int, stride: int) -> None:
        P = self.pseudo
        if min(rows, columns, count) > 0:
            self._add(
                Piece(FULL, self.batch, self.batches, query * P, rows * P, key * P, columns * P, count, stride * P)
            )

    def triangle(self, kind: int, query: int, key: int, size: int, count: int, stride: int, own: bool = False) -> None:
        """A triangle over whole tokens, its diagonal included. `own`: the diagonal is each token with itself."""
        if min(size, count) < 1:
            return
        P, rows = self.pseudo, (self.batch, self.batches)
        self._add(Piece(kind, *rows, query * P, size * P, key * P, size * P, count, stride * P))
        if P == 1 or (own and self.virtual):
            return
        other, dq, dk = (ANTI, 0, 1) if kind == CAUSAL else (CAUSAL, 1, 0)
        self._add(Piece(other, *rows, query * P + dq, P - 1, key * P + dk, P - 1, count, stride * P, size, P))

    def _add(self, piece: Piece) -> None:
        if piece.rows == piece.columns == 1:
            piece = piece._replace(kind=FULL)
        if self.pieces and piece.kind == FULL:
            last = self.pieces[-1]
            if piece == last._replace(key=last.key + last.columns, columns=piece.columns):
                self.pieces[-1] = last._replace(columns=last.columns + piece.columns)
                return
        self.pieces.append(piece)


@functools.lru_cache(maxsize=1024)
def _lower(
    T: int,
    S: int,
    causal: bool,
    window: int | None,
    pseudo: int,
    virtual: bool,
    batch: int,
    batches: int,
    q0: int,
    k0: int,
) -> tuple[Piece, ...]:
    """T queries, the last of S keys, standing at q0 and k0 of the tensors."""
    build = _Builder(batch, batches, pseudo, virtual)
    past = S - T
    if window is None or window >= S:
        if causal:
            build.full(q0, T, k0, past, 1, 1)
            build.triangle(CAUSAL, q0, k0 + past, T, 1, 1, own=True)
        else:
            build.full(q0, T, k0, S, 1, 1)
        return tuple(build.pieces)
    done = 0
    while done < T:
        start = past + done  # key index of the block's first query
        rows = min(window, T - done)
        before = min(window - 1, start)
        after = 0 if causal else min(window - 1, S - start - rows)
        count = 1
        if rows == window and before == window - 1 and causal:
            count = (T - done) // window
        elif rows == window and before == window - 1 and after == window - 1:
            count = (S - (window - 1) - start) // window
        _band(build, window, causal, rows, before, after, q0 + done, k0 + start, count)
        done += rows * count
    return tuple(build.pieces)


def _band(
    build: _Builder, W: int, causal: bool, rows: int, before: int, after: int, query: int, key: int, count: int
) -> None:
    """A block of `rows` queries whose own keys start at `key`, `before` keys before them and `after` keys after."""
    if before:
        whole = min(rows, W - before)  # rows that see all of the keys before
        partial = min(rows, W - 1) - whole  # row a sees those from key + a - W + 1 on
        first = key + whole - W + 1
        build.full(query, whole, key - before, before, count, W)
        build.triangle(ANTI, query + whole, first, partial, count, W)
        build.full(query + whole, partial, first + partial, W - 1 - whole - partial, count, W)
    if causal:
        build.triangle(CAUSAL, query, key, rows, count, W, own=True)
    else:
        build.full(query, rows, key, rows, count, W)
    if after:
        end = key + rows
        blind = max(0, rows - W + 1)  # rows that see none of the keys after
        whole = min(max(rows + after - W, blind), rows)  # from here on rows see all; between, up to key + a + W - 1
        last = key + blind + W - 1
        build.full(query + blind, whole - blind, end, last - end, count, W)
        build.triangle(CAUSAL, query + blind, last, whole - blind, count, W)
        build.full(query + whole, rows - whole, end, after, count, W)


_SEGMENTS: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def segments(documents_BS: Tensor) -> list[tuple[int, int, list[tuple[int, int]]]] | None:
    """(first batch row, rows, [(start, end) of each document]) or None where a document is not one run.

    Reads the values, once per tensor: all layers of a model share it.
    """
    held = _SEGMENTS.get(documents_BS)
    if held is not None and held[0] == documents_BS._version:
        return held[1]
    groups: list[tuple[int, int, list[tuple[int, int]]]] | None = []
    for b, row in enumerate(documents_BS.tolist()):
        cuts = [0, *(i for i in range(1, len(row)) if row[i] != row[i - 1]), len(row)]
        runs = [(i, j) for i, j in itertools.pairwise(cuts) if i < j and row[i] >= 0]
        if len({row[i] for i, _ in runs}) < len(runs):
            groups = None
            break
        assert groups is not None
        if groups and groups[-1][2] == runs:
            groups[-1] = (groups[-1][0], groups[-1][1] + 1, runs)
        else:
            groups.append((b, 1, runs))
    _SEGMENTS[documents_BS] = (documents_BS._version, groups)
    return groups


def lower(visibility: Visibility, batch: int, pseudo: int = 1, virtual: bool = False) -> tuple[Piece, ...] | None:
    """The pieces of a visibility for a batch of `batch` rows, or None where only a dense mask can say it.

    Token data is read eagerly; while compiling (or on the meta device) it has no values, so only structure lowers.
    """
    if visibility.pairs_BTS is not None:
        return None
    T, S, past = visibility.T, visibility.S, visibility.past
    common = (visibility.causal, visibility.window, pseudo, virtual)
    documents_BS = visibility.documents_BS
    if documents_BS is None:
        structure = _lower.__wrapped__ if torch.compiler.is_compiling() else _lower  # a compiler traces no cache
        return structure(T, S, *common, 0, batch, 0, 0)
    if torch.compiler.is_compiling() or documents_BS.is_meta:
        return None
    if documents_BS.shape[0] != batch:
        return None
    groups = segments(documents_BS)
    if groups is None or sum(len(runs) for _, _, runs in groups) > MOST_SEGMENTS:
        return None
    pieces: list[Piece] = []
    for first, rows, runs in groups:
        for start, end in runs:
            if end > past:
                query = max(0, start - past)
                pieces += _lower(end - past - query, end - start, *common, first, rows, query, start)
    return tuple(pieces)
