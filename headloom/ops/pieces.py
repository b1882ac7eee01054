"""Lowering a mask to a few rectangles that a fused kernel does without a dense mask.

A piece is `groups` equal rectangles, `stride` apart on both axes, each FULL, CAUSAL (key column <= query row) or BAND
(a rule on the distance of row and column, which all the piece's rectangles share as one small additive mask). Pieces of
one lowering are disjoint and their union is exactly what is visible, so their pairs add up to the exact operations.
Sizes are in rows of the scores, P per token (`rows_per_token`).

Causality after a cache is a full rectangle and a causal square. A window is cut into blocks of a few rows, each with
all the keys it sees: R rows of a window of W see W + R - 1 keys, so the fewer rows, the fewer hidden pairs are
computed.
With P rows per token the kernel's causal square is that of rows that are causal among themselves; where they are not, a
row also sees the later rows of its own token, a BAND within blocks on the diagonal.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, MutableMapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from headloom.ops.masks import Visibility

FULL, CAUSAL, BAND = 0, 1, 2
TOKENS, UPTO, LATER = 0, 1, 2  # what a BAND shows of a row's own token: all, up to the row itself, only after it
MOST_SEGMENTS = 64  # beyond it (many short documents in a batch), query blocks with an additive mask are faster
_KERNEL_KEYS = 512  # the kernel leaves out whole blocks of so many keys: one block's causal square is done in full
_FEWEST_ROWS, _MOST_ROWS = 32, 256  # of a BAND: with fewer, short products dominate; more gain nothing
_MOST_PAIRS = 1 << 18  # of a BAND: its additive mask holds so many numbers


class Piece(NamedTuple):
    """`groups` rectangles, `stride` apart, in `batches` rows of the batch.

    A BAND with `rows_per_token` = P shows to row i the columns j with low <= j // P - i // P <= high, where the
    distance `high` is one's own token if `own` is not TOKENS.
    """

    kind: int
    batch: int
    batches: int
    query: int
    rows: int
    key: int
    columns: int
    groups: int = 1
    stride: int = 1
    low: int = 0
    high: int = 0
    rows_per_token: int = 1
    own: int = TOKENS

    def visible(self, device: torch.device | None = None) -> Tensor:
        """What one rectangle shows, bool (rows, columns)."""
        row = torch.arange(self.rows, device=device)[:, None]
        column = torch.arange(self.columns, device=device)
        if self.kind == FULL:
            return torch.ones(self.rows, self.columns, dtype=torch.bool, device=device)
        if self.kind == CAUSAL:
            return column <= row
        token, key = row // self.rows_per_token, column // self.rows_per_token
        out = (key >= token + self.low) & (key <= token + self.high)
        if self.own == TOKENS:
            return out
        upto = column <= row + self.high * self.rows_per_token
        return out & (upto if self.own == UPTO else ~upto)

    def pairs(self) -> int:
        """Visible (query, key) pairs, per head."""
        if self.kind == FULL:
            each = self.rows * self.columns
        elif self.kind == CAUSAL:
            each = self.rows * (self.rows + 1) // 2
        else:
            each = int(self.visible().sum())
        return each * self.groups * self.batches

    def cut(self, rows: int, columns: int) -> Iterator[Piece]:
        """The piece in tiles of about so many rows and columns, each FULL, CAUSAL or BAND, without what it hides.

        Only the columns of a BAND are cut: its rows are few.
        """
        across = self.rows_per_token * -(-self.columns // (self.rows_per_token * -(-self.columns // columns)))
        for left in range(0, self.columns, across):
            width = min(across, self.columns - left)
            if self.kind == BAND:
                yield from self._strip(left, width)
                continue
            top = 0
            if self.kind == CAUSAL:
                yield self._replace(query=self.query + left, rows=width, key=self.key + left, columns=width)
                top = left + width
            for first in range(top, self.rows, rows):
                height = min(rows, self.rows - first)
                tile = self._replace(query=self.query + first, rows=height, key=self.key + left, columns=width)
                yield tile._replace(kind=FULL)

    def _strip(self, left: int, width: int) -> Iterator[Piece]:
        """The columns of a BAND from `left` on, whole tokens."""
        P = self.rows_per_token
        low, high = self.low - left // P, self.high - left // P
        nearest, farthest = -((self.rows - 1) // P), (width - 1) // P  # distances of columns from rows
        if high < nearest or low > farthest:
            return
        strip = self._replace(key=self.key + left, columns=width)
        if self.own != LATER and low <= nearest and high >= farthest + (self.own == UPTO and P > 1):
            yield strip._replace(kind=FULL, low=0, high=0, rows_per_token=1, own=TOKENS)
        else:
            yield strip._replace(low=low, high=high)


class _Builder:
    """Collects pieces given in tokens, for one group of batch rows."""

    def __init__(self, batch: int, batches: int, rows_per_token: int, rows_causal: bool):
        self.batch, self.batches, self.rows_per_token, self.rows_causal = batch, batches, rows_per_token, rows_causal
        self.pieces: list[Piece] = []

    def _add(
        self, kind: int, query: int, rows: int, key: int, columns: int, groups: int = 1, stride: int = 1, **band: int
    ) -> None:
        if min(rows, columns, groups) < 1:
            return
        P = self.rows_per_token
        where = (self.batch, self.batches, query * P, rows * P, key * P, columns * P)
        self.pieces.append(Piece(kind, *where, groups, stride * P, **band))

    def full(self, query: int, rows: int, key: int, columns: int) -> None:
        self._add(FULL, query, rows, key, columns)

    def causal(self, query: int, past: int, key: int, size: int) -> None:
        """`size` queries after `past` keys, all of them and one's own visible."""
        one = size == 1 and (self.rows_per_token == 1 or not self.rows_causal)  # it sees all
        self.full(query, size, key, past + one * size)
        if one:
            return
        if _KERNEL_KEYS // 2 < size * self.rows_per_token <= _KERNEL_KEYS:
            block = -(-size // 4)
            for done in range(0, size, block):
                rows = min(block, size - done)
                self.band(query + done, rows, key + past, done + rows, 1, -size, done, UPTO)
        else:
            self._add(CAUSAL, query, size, key + past, size)
        if self.rows_per_token > 1 and not self.rows_causal:
            block = min(size, max(1, _FEWEST_ROWS // self.rows_per_token))
            for done, rows, count in ((0, block, size // block), (size - size % block, size % block, 1)):
                own = key + past + done
                band = {"rows_per_token": self.rows_per_token, "own": LATER}
                self._add(BAND, query + done, rows, own, rows, count, block, **band)

    def band(self, query: int, rows: int, key: int, columns: int, groups: int, low: int, high: int, own: int) -> None:
        everything = low <= 1 - rows and high >= columns - 1 and (own == TOKENS or self.rows_per_token == 1)
        band = {} if everything else {"low": low, "high": high, "rows_per_token": self.rows_per_token, "own": own}
        self._add(FULL if everything else BAND, query, rows, key, columns, groups, rows, **band)


@functools.lru_cache(maxsize=1024)
def _lower(
    T: int,
    S: int,
    causal: bool,
    window: int | None,
    rows_per_token: int,
    rows_causal: bool,
    batch: int,
    batches: int,
    q0: int,
    k0: int,
) -> tuple[Piece, ...]:
    """T queries, the last of S keys, standing at q0 and k0 of the tensors."""
    build = _Builder(batch, batches, rows_per_token, rows_causal)
    past = S - T
    if window is not None and window < S:
        _windowed(build, T, S, causal, window, q0, k0)
    elif causal:
        build.causal(q0, past, k0, T)
    else:
        build.full(q0, T, k0, S)
    return tuple(build.pieces)


def _windowed(build: _Builder, T: int, S: int, causal: bool, W: int, q0: int, k0: int) -> None:
    past, done, block = S - T, 0, _block(W, build.rows_per_token)
    if causal and past < W:  # the window leaves these queries all the keys before them
        done = min(T, W - past)
        build.causal(q0, past, k0, done)
    ahead = 0 if causal else W - 1
    while done < T:
        start = past + done  # key index of the block's first query
        rows = min(block, T - done)
        before, after = min(W - 1, start), min(ahead, S - start - rows)
        count = 1
        if rows == block and before == W - 1 and after == ahead:
            count = (S - ahead - start) // block
        low, high = before - W + 1, before + ahead
        own = UPTO if build.rows_causal else TOKENS
        build.band(q0 + done, rows, k0 + start - before, before + rows + after, count, low, high, own)
        done += rows * count


def _block(W: int, P: int) -> int:
    """Tokens in one block of a window's queries: few compute few hidden pairs, many use a kernel better."""
    rows = max(_FEWEST_ROWS, min(W * P // 8, _MOST_PAIRS // (W * P), _MOST_ROWS))
    return max(1, rows // P)


_Segments = list[tuple[int, int, list[tuple[int, int]]]] | None
_SEGMENTS: MutableMapping[Tensor, tuple[int, _Segments]] = WeakTensorKeyDictionary()


def segments(documents_BS: Tensor) -> _Segments:
    """(first batch row, rows, [(start, end) of each document]) or None where a document is not one run.

    Reads the values, once per tensor: all layers of a model share it.
    """
    held = _SEGMENTS.get(documents_BS)
    if held is not None and held[0] == documents_BS._version:
        return held[1]
    groups: _Segments = []
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


def lower(
    visibility: Visibility, batch: int, rows_per_token: int = 1, rows_causal: bool = False
) -> tuple[Piece, ...] | None:
    """The pieces of a visibility for a batch of `batch` rows, or None where it takes a dense mask.

    Token data is read eagerly; while compiling (or on the meta device) it has no values, so only structure lowers.
    """
    if visibility.pairs_BTS is not None or (rows_causal and rows_per_token > 1 and not visibility.causal):
        return None
    if torch.compiler.is_exporting():  # pieces follow from lengths, which an exported graph leaves open
        return None
    T, S, past = visibility.T, visibility.S, visibility.past
    common = (visibility.causal, visibility.window, rows_per_token, rows_causal)
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
