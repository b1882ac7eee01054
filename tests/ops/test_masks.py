"""Masks: what each refuses, and that joining never loosens."""

import pytest
import torch

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops.masks import Visibility, expand_pseudo, sort_rules


def lowered(mask, T, S, *, causal=False, window=None):
    rules = sort_rules(mask, causal=causal, window=window)
    return Visibility.of(rules, T, S, None, torch.device("cpu")).dense()[0].int().tolist()


def test_indices_count_the_cache():
    """Two new queries over five keys see four and five; W=2 leaves the last two of each."""
    assert lowered(None, 2, 5, causal=True) == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert lowered(hl.Window(2), 2, 5, causal=True) == [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert lowered(hl.Window(2), 2, 5) == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 1]]


def test_joined_masks_are_the_intersection():
    assert lowered(hl.Causal() & hl.Window(2), 3, 3) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    assert lowered(hl.Window(3) & hl.Window(1), 3, 3) == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert lowered(hl.Window(3), 3, 3, window=2) == lowered(hl.Window(2), 3, 3, window=3)
    some = torch.tensor([[[True, False], [True, True]]])
    assert lowered(hl.Dense(some) & hl.Dense(~some | torch.eye(2, dtype=torch.bool)), 2, 2) == [[1, 0], [0, 1]]


def test_a_four_dimensional_dense_mask_loses_its_head_axis():
    pairs = torch.rand(2, 3, 3) > 0.5
    assert torch.equal(hl.Dense(pairs[:, None]).values, pairs)


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(2, 3, 3),
        torch.ones(2, 3, 3, dtype=torch.long),
        torch.ones(3, 3, dtype=torch.bool),
        torch.ones(2, 4, 3, 3, dtype=torch.bool),
    ],
    ids=["float", "long", "two axes", "heads"],
)
def test_dense_refuses_what_it_cannot_mean(values):
    with pytest.raises(HeadloomError, match="Dense"):
        hl.Dense(values)


def test_masks_are_frozen():
    with pytest.raises(AttributeError):
        hl.Window(3).width = 5
    with pytest.raises(AttributeError):
        hl.Padding(torch.ones(1, 2, dtype=torch.bool)).values = torch.zeros(1, 2, dtype=torch.bool)


def test_documents_given_twice_are_refused():
    documents = torch.zeros(1, 2, dtype=torch.long)
    with pytest.raises(HeadloomError, match="documents"):
        sort_rules(hl.Documents(documents) & hl.Documents(documents), causal=True, window=None)


def test_expanded_pseudo_tokens():
    """Case 9 at the mask: T=3, P=2 rows see 1..6 (virtual) or 2,2,4,4,6,6 (token) keys; after a cache all of it too."""
    causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    assert expand_pseudo(causal, 0, 2, True)[0].sum(-1).tolist() == [1, 2, 3, 4, 5, 6]
    assert expand_pseudo(causal, 0, 2, False)[0].sum(-1).tolist() == [2, 2, 4, 4, 6, 6]
    assert expand_pseudo(causal[:, 2:], 2, 2, True)[0].sum(-1).tolist() == [5, 6]
