"""Static caches in a compiled decoding, for families whose layers differ in kind."""

import pytest
import torch
from transformers import StaticCache

from headloom.hf import graft

KINDS = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(("name", "layers"), [("qwen3", 1), ("gemma2", 0)], indirect=["name"])
def test_windows_by_layer_settle_to_one_graph(name, base, batch, counting, layers):
    """A window of 5 fills while decoding; from then on every token is the same graph, and the tokens are as ever."""
    switched = {"use_sliding_window": True} if name == "qwen3" else {}
    model = base(num_hidden_layers=2, layer_types=KINDS, sliding_window=5, **switched)
    model = graft(model, "iha", layers=layers, pseudo_heads=2)
    x, mask = batch[0][:, -3:], torch.tensor([[0, 1, 1], [1, 1, 1]])
    settings = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
    wanted = model.generate(x, attention_mask=mask, use_cache=False, **settings)
    assert torch.equal(counting.decode(model, x, mask, 9), wanted)
    assert counting.at_token[-5] == counting.at_token[-1] <= 4


@pytest.mark.parametrize(("name", "room"), [("llama", None), ("gpt2", 12), ("mistral", 12)], indirect=["name"])
def test_a_4d_mask_in_a_compiled_call(base, name, near, room, counting):
    """A prefix that sees itself both ways; after it, in a static cache, a tree of drafts."""
    original, model = base(num_hidden_layers=2), base(num_hidden_layers=2)
    model = graft(model, "iha", layers=0, pseudo_heads=2, order="virtual")
    x, windowed = torch.randint(3, 37, (1, 9), generator=torch.Generator().manual_seed(3)), name == "mistral"
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]])
    drafts = torch.cat((torch.ones(4, 4 if windowed else 5), tree), 1)  # a window of 5 keeps four
    masks = [mask.bool()[None, None] for mask in (torch.ones(5, 5), drafts)]
    if room is not None and not windowed:
        masks = [torch.nn.functional.pad(mask, (0, room - mask.shape[-1])) for mask in masks]

    def run(call, form):
        with torch.no_grad():
            if room is None:
                return call(x[:, :5], attention_mask=form(masks[0]), use_cache=False).logits
            cache = StaticCache(config=model.config, max_cache_len=room)
            out = call(x[:, :5], attention_mask=form(masks[0]), cache=cache, use_cache=True)
            places = torch.tensor([[5, 6, 5, 6]])
            more = call(x[:, 5:], attention_mask=form(masks[1]), cache=out.cache, position_ids=places)
        return torch.cat((out.logits, more.logits), 1)

    def floats(visible):
        return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -torch.inf)

    compiled = torch.compile(model, backend=counting, fullgraph=True)
    near(run(compiled, floats if room is None else lambda visible: visible), run(original, floats))
    if room is None:  # the graph looks at the values itself
        with pytest.raises(RuntimeError, match="other biases are not supported"):
            compiled(x[:, :5], attention_mask=torch.full((1, 1, 5, 5), -0.5, dtype=torch.float64), use_cache=False)
