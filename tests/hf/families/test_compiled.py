"""Static caches in a compiled decoding, for families whose layers differ in kind."""

import pytest
import torch

from headloom.hf import graft

KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(("name", "layers"), [("qwen3", 1), ("gemma2", 0)], indirect=["name"])
def test_windows_by_layer_settle_to_one_graph(name, base, batch, counting, layers):
    """A window of 5 fills while decoding; from then on every token is the same graph, and the tokens are as ever."""
    switched = {"use_sliding_window": True} if name == "qwen3" else {}
    model = base(num_hidden_layers=2, layer_types=KINDS, sliding_window=5, **switched)
    graft(model, "iha", layers=layers, pseudo_heads=2)
    x, mask = batch[0][:, -3:], torch.tensor([[0, 1, 1], [1, 1, 1]])
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(x, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(counting.decode(model, x, mask, 9), wanted)
    assert counting.at_token[-5] == counting.at_token[-1] <= 4
