"""Pieces: their union is exactly what may be seen by the definition in oracles/common.py, each pair once."""

import itertools

import pytest
import torch
from oracles.common import visible

from headloom.ops.masks import Visibility
from headloom.ops.pieces import BAND, FULL, lower


def covered(pieces, batch, rows, columns):
    """(batch, rows, columns) ints: how many pieces cover each pair."""
    out = torch.zeros(batch, rows, columns, dtype=torch.int)
    for piece in pieces:
        block = piece.visible().int()
        for b, i in itertools.product(range(piece.batches), range(piece.groups)):
            top, left = piece.query + i * piece.stride, piece.key + i * piece.stride
            assert top + piece.rows <= rows and left + piece.columns <= columns
            out[piece.batch + b, top : top + piece.rows, left : left + piece.columns] += block
    return out


def wanted(T, S, causal, window, P, rows_causal, row=None):
    """The oracle's visibility of pseudo-tokens; `row` holds a document per key, -1 = padding."""
    out = torch.zeros(T * P, S * P, dtype=torch.int)
    document = [0] * S if row is None else row
    for t, n in itertools.product(range(T), range(S)):
        i = S - T + t
        if not visible(i, n, document[i], document[n], document[i] >= 0, document[n] >= 0, causal, window):
            continue
        for p, p2 in itertools.product(range(P), range(P)):
            out[t * P + p, n * P + p2] = int(not rows_causal or n * P + p2 <= i * P + p)
    return out


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("T", [1, 2, 3, 5, 8, 13])
def test_structure(T, causal):
    """Every window and every length of cache, for one and three pseudo-tokens, in both orders."""
    for past, window in itertools.product((0, 1, 2, 4, 7, 11), (None, 1, 2, 3, 4, 5, 7, 12, 13, 30)):
        S = past + T
        for P, rows_causal in ((1, False), (2, False), (3, False), *(((2, True), (3, True)) if causal else ())):
            pieces = lower(Visibility(T, S, causal, window), 2, P, rows_causal)
            found = covered(pieces, 2, T * P, S * P)
            want = wanted(T, S, causal, window, P, rows_causal)
            assert torch.equal(found, want.expand_as(found)), (T, S, window, P, rows_causal, pieces)
            assert sum(piece.pairs() for piece in pieces) == 2 * int(want.sum())


@pytest.mark.parametrize("causal", [True, False])
def test_tiles_show_what_their_piece_shows(causal):
    """Cut into tiles of 3 and of 4 tokens a side: the same pairs, and none that are hidden altogether."""
    for T, past, window in itertools.product((1, 8, 13), (0, 4), (None, 1, 3, 7)):
        for P, rows_causal in ((1, False), (3, False), *(((3, True),) if causal else ())):
            pieces = lower(Visibility(T, past + T, causal, window), 2, P, rows_causal)
            want = covered(pieces, 2, T * P, (past + T) * P)
            for side in (3, 4):
                tiles = [tile for piece in pieces for tile in piece.cut(side * P, side * P)]
                assert torch.equal(covered(tiles, 2, T * P, (past + T) * P), want)
                assert all(tile.pairs() for tile in tiles)
                assert sum(tile.pairs() for tile in tiles) == sum(piece.pairs() for piece in pieces)
                assert max(tile.columns for tile in tiles) <= side * P
                cut = [tile for piece in pieces if piece.kind != BAND for tile in piece.cut(side * P, side * P)]
                assert all(tile.rows <= side * P for tile in cut)


ROWS = [
    [[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 0, 0, 0, 0]],
    [[-1, -1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 0, -1, -1]],
    [[-1, 0, 0, 1, 1, -1, 2, 2, -1], [-1] * 9],
    [[5, 5, 5, 5, 3, 3, 3, 3, 3], [5, 5, 5, 5, 3, 3, 3, 3, 3]],
    [[0, 1, 2, 3, 4, 5, 6, 7, 8], [0, 0, -1, -1, -1, -1, -1, 1, 1]],
]


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("T", [1, 4, 9])
def test_documents_and_padding(T, rows):
    for causal, window, P in itertools.product((True, False), (None, 1, 2, 4), (1, 2)):
        for rows_causal in {False, causal and P > 1}:
            pieces = lower(Visibility(T, 9, causal, window, torch.tensor(rows)), 2, P, rows_causal)
            found = covered(pieces, 2, T * P, 9 * P)
            want = torch.stack([wanted(T, 9, causal, window, P, rows_causal, row) for row in rows])
            assert torch.equal(found, want), (T, causal, window, P, rows_causal)


def test_a_document_in_two_runs_has_no_pieces():
    assert lower(Visibility(5, 5, True, None, torch.tensor([[0, 0, 1, 0, 0]])), 1) is None


def test_values_changed_in_place_are_read_again():
    """The values are read once per tensor and version: an in-place change must not meet the old pieces."""
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    first = lower(Visibility(5, 5, True, None, documents), 1)
    documents[0, 2] = 1
    second = lower(Visibility(5, 5, True, None, documents), 1)
    assert first != second
    assert torch.equal(covered(second, 1, 5, 5)[0], wanted(5, 5, True, None, 1, False, [0, 0, 1, 1, 1]))


@pytest.mark.parametrize(("T", "window", "most"), [(8192, None, 1), (8192, 256, 8), (8191, 100, 14)])
def test_few_pieces_for_long_sequences(T, window, most):
    """The number of pieces does not grow with the length; a window costs T (2 W - 1) pairs and not T^2."""
    pieces = lower(Visibility(T, T, True, window), 1, 1, False)
    assert len(pieces) <= most
    W = window or T
    assert sum(piece.pairs() for piece in pieces) == W * (W + 1) // 2 + (T - W) * W


@pytest.mark.parametrize(("P", "W"), [(1, 64), (1, 256), (1, 1024), (2, 1024), (4, 256), (8, 64)])
def test_little_is_computed_in_vain(P, W):
    """Rectangles that are mostly visible: a window executes at most 1.3 times its pairs (1.6 the narrowest)."""
    pieces = lower(Visibility(8192, 8192, True, W), 1, P, P > 1)
    executed = sum(piece.rows * piece.columns * piece.groups for piece in pieces)
    assert executed <= (1.3 if W * P > 64 else 1.6) * sum(piece.pairs() for piece in pieces)


@pytest.mark.parametrize("order", ["token", "virtual"])
def test_pseudo_tokens_cost_a_few_pieces(order):
    pieces = lower(Visibility(4096, 4096, True, None), 1, 4, order == "virtual")
    assert len(pieces) == (1 if order == "virtual" else 2)


@pytest.mark.parametrize(("P", "rows_causal"), [(1, False), (1, True), (3, False)])
def test_one_new_token_is_one_piece(P, rows_causal):
    """It sees all before it, or all in its window, and itself: one call of the kernel, without a mask."""
    for window in (None, 4):
        (piece,) = lower(Visibility(1, 9, True, window), 2, P, rows_causal)
        assert piece.kind == FULL
