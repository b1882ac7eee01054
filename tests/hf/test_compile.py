"""torch.compile: training is one graph, and so is decoding, for every token the same (backend aot_eager)."""

import pytest
import torch
from transformers import StaticCache

from headloom.hf import graft

G2 = {"num_kv_heads": 2}
SPECS = {
    "iha": ("iha", {**G2, "pseudo_heads": 2}),
    "sas": ("sas", {**G2, "simulated_heads": 8, "kernel_size": 3}),
    "sas base": ("sas", {**G2, "simulated_heads": 8, "kernel_size": 3, "cache": "base"}),
    "deltaformer": ("deltaformer", G2),
}
SETTINGS = {"do_sample": False, "eos_token_id": None}
CLOSE = {"rtol": 0, "atol": 1e-10}


def padded(ids, T, empty):
    x, mask = ids(2, T), torch.ones(2, T, dtype=torch.long)
    mask[0, :empty] = 0
    return x, mask


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_a_static_cache_decodes_in_one_graph(mixed, ids, counting, spec):
    """Left-padded prompts; the graph of the first token serves all, and the tokens are those of the dynamic cache."""
    model, (x, mask) = mixed([spec]), padded(ids, 5, 2)
    wanted = model.generate(x, attention_mask=mask, max_new_tokens=10, **SETTINGS)
    assert torch.equal(counting.decode(model, x, mask, 10), wanted)
    assert counting.at_token == [0, *[1] * 9]


def test_static_windows_settle_to_one_graph(mixed, ids, counting):
    """W = 3 in one of two layers: while it fills it is another graph; once it is full no token makes a new one."""
    model = mixed([("iha", {**G2, "pseudo_heads": 2, "window": 3}), ("gqa", G2)])
    x, mask = padded(ids, 2, 1)
    wanted = model.generate(x, attention_mask=mask, max_new_tokens=9, **SETTINGS)
    assert torch.equal(counting.decode(model, x, mask, 9), wanted)
    assert counting.at_token[-5] == counting.at_token[-1] <= 4


def test_a_partial_graft_by_hand(llama, ids, counting):
    """No mask, prompt and steps through the compiled model, a layer that was not grafted beside those that were."""
    model, x = llama(num_hidden_layers=2), ids(2, 12)
    model = graft(model, "iha", layers=1, pseudo_heads=2)
    with torch.no_grad():
        wanted = model(x, use_cache=False).logits
        compiled = torch.compile(model, backend=counting, fullgraph=True, dynamic=False)
        cache = StaticCache(config=model.config, max_cache_len=15)
        logits, graphs = [compiled(x[:, :4], cache=cache).logits], []
        for i in range(4, 12):
            logits.append(compiled(x[:, i : i + 1], cache=cache, position_ids=torch.full((2, 1), i)).logits)
            graphs.append(counting.graphs)
    torch.testing.assert_close(torch.cat(logits, 1), wanted, **CLOSE)
    assert len(set(graphs[1:])) == 1, "the first step meets an initialised cache, and so is another graph"


def test_a_growing_cache_is_soon_one_graph(mixed, ids, counting):
    model, (x, mask) = mixed([("gqa", G2)]), padded(ids, 5, 2)
    wanted = model.generate(x, attention_mask=mask, max_new_tokens=8, **SETTINGS)
    model.forward = torch.compile(model.forward, backend=counting, fullgraph=True)
    watch = {"logits_processor": [counting.processor()]}
    assert torch.equal(model.generate(x, attention_mask=mask, max_new_tokens=8, **watch, **SETTINGS), wanted)
    assert counting.at_token == [1, 2, *[3] * 6], "the prompt, one token, and any token"


@pytest.mark.parametrize(
    ("spec", "documents"), [(SPECS["iha"], True), (SPECS["sas"], False)], ids=["iha packed", "sas"]
)
def test_training_is_one_graph(mixed, ids, counting, spec, documents):
    model, x = mixed([spec]).train(), ids(2, 7)
    call = {"labels": x, "use_cache": False}
    if documents:
        call["position_ids"] = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)

    def step(run):
        model.zero_grad()
        loss = run(x, **call).loss
        loss.backward()
        return loss.detach(), [p.grad.clone() for p in model.parameters()]

    wanted = step(model)
    got = step(torch.compile(model, backend=counting, fullgraph=True))
    torch.testing.assert_close(got, wanted, **CLOSE)
    assert counting.graphs == 1


def test_training_lengths_share_a_graph(mixed, ids, counting):
    model = mixed([("mha", {})]).train()
    compiled = torch.compile(model, backend=counting, fullgraph=True)
    for T in (7, 9, 12):
        torch.testing.assert_close(compiled(ids(2, T)).logits, model(ids(2, T)).logits, **CLOSE)
    assert counting.graphs == 2, "the first length, and any length"


def test_an_exported_graft_serves_every_length(llama, ids):
    class Logits(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x, use_cache=False).logits

    model = llama().eval()
    model = graft(model, "iha", pseudo_heads=2)
    length = {1: torch.export.Dim("T", min=2, max=1000)}
    program = torch.export.export(Logits(model), (ids(1, 12),), dynamic_shapes=(length,)).module()
    for T in (2, 19):
        x = ids(1, T)
        torch.testing.assert_close(program(x), model(x).logits, rtol=0, atol=1e-10)
