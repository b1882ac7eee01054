"""Masks: what each refuses, and that joining never loosens."""

import pytest
import torch

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops.masks import Visibility, expand_rows, sort_rules


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


def test_exactly_leaves_a_layers_own_rule_out():
    assert lowered(hl.Exactly(hl.Window(3)), 3, 3, causal=True, window=1) == [[1, 1, 1]] * 3
    assert lowered(hl.Exactly(hl.Causal()) & hl.Window(2), 3, 3, window=1) == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    nested = hl.Exactly(hl.Exactly(hl.Window(1) & hl.Causal()))
    assert lowered(nested.to("cpu"), 2, 3, causal=True) == [[0, 1, 0], [0, 0, 1]]
    assert sort_rules(hl.Exactly(hl.Causal()), causal=False, window=2).exact
    assert not sort_rules(hl.Causal(), causal=False, window=2).exact
    with pytest.raises(HeadloomError, match="Exactly takes a mask, not a Tensor: wrap booleans"):
        hl.Exactly(torch.ones(1, 2, 2, dtype=torch.bool))


def test_padding_and_documents_come_once():
    """As an argument or inside a mask: two that differ cannot both hold."""
    attn, x, ids = hl.attention("mha", hidden_size=4, num_heads=1), torch.randn(1, 2, 4), torch.zeros(1, 2).long()
    with pytest.raises(HeadloomError, match="documents came twice"):
        attn(x, documents=ids, mask=hl.Documents(ids))
    with pytest.raises(HeadloomError, match="padding came twice"):
        attn(x, padding=ids + 1, mask=hl.Padding(ids + 1))


def test_tokens_go_on_in_the_document_that_a_cache_ends_with():
    """Two documents of three tokens each are remembered; a token that says nothing belongs to the second."""
    attn, x = hl.attention("mha", hidden_size=4, num_heads=1).double(), torch.randn(1, 7, 4).double()
    documents, cache = torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), hl.Cache()
    want = attn(x, documents=documents)[:, 6:]
    attn(x[:, :6], documents=documents[:, :6], cache=cache)
    torch.testing.assert_close(attn(x[:, 6:], cache=cache), want, rtol=0, atol=1e-12)


def test_expanded_pseudo_tokens():
    """T=3, P=2 rows see 1..6 (virtual) or 2,2,4,4,6,6 (token) keys; after a cache all of it too."""
    causal = torch.ones(1, 3, 3, dtype=torch.bool).tril()
    assert expand_rows(causal, 0, 2, True)[0].sum(-1).tolist() == [1, 2, 3, 4, 5, 6]
    assert expand_rows(causal, 0, 2, False)[0].sum(-1).tolist() == [2, 2, 4, 4, 6, 6]
    assert expand_rows(causal[:, 2:], 2, 2, True)[0].sum(-1).tolist() == [5, 6]
    everything = torch.ones(1, 3, 3, dtype=torch.bool)  # only within a token does the order count
    assert expand_rows(everything, 0, 2, True)[0].sum(-1).tolist() == [5, 6, 5, 6, 5, 6]
    assert expand_rows(everything[:, 2:], 2, 2, True)[0, 0].tolist() == [True, True, True, True, True, False]
