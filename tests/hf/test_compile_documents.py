"""The whole model under torch.compile: no graph break, and no mask where there are no documents."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import headloom as hl
from headloom.ops import tokens

SIZES = {"hidden_size": 24, "num_layers": 1, "num_heads": 4, "vocab_size": 13, "intermediate_size": 8}


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["mha", "iha"])
def test_one_graph_without_documents(name):
    """Scores are told their structure, not a dense mask: a model that is given no positions has no documents."""
    model = hl.build_model(name, max_positions=8, **SIZES)
    counter = CompileCounterWithBackend("aot_eager")
    ids = torch.randint(13, (2, 7))
    want = model(input_ids=ids, labels=ids).loss
    found = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)
    scores = [n for graph in counter.graphs for n in graph.graph.nodes if n.target is torch.ops.headloom.scores.default]
    assert counter.frame_count == 1
    assert all(node.args[3:5] == (None, None) and node.args[7] is False for node in scores)


def test_layers_do_not_look_for_restarts(monkeypatch):
    """A reduction and a wait for the device, once a layer, for a model that was given no positions."""

    def looked(*args):
        raise AssertionError("looked for restarts")

    model = hl.build_model("mha", max_positions=8, **SIZES)
    ids = torch.tensor([[1, 2, 3, 4]])
    monkeypatch.setattr(tokens, "restarts", looked)
    plain = model(input_ids=ids).logits
    counted = torch.arange(4)[None]
    with pytest.raises(AssertionError, match="looked"):
        model(input_ids=ids, position_ids=counted)
    monkeypatch.undo()
    torch.testing.assert_close(model(input_ids=ids, position_ids=counted).logits, plain)
