"""Grafts of configs as published, and of switches that some checkpoints set: kept, saved, loaded, continued."""

import pytest
import torch
from published import KINDS
from transformers import AutoConfig
from transformers.models.auto import modeling_auto

from headloom.hf import graft
from headloom.hf.checkpoints import is_causal

WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": KINDS}
ROUNDING = 2e-4  # of float32, over the logits' range: as a graft allows
SWITCHED = {"qwen2": WINDOWED, "qwen3": WINDOWED, "gpt2": {"scale_attn_by_inverse_layer_idx": True}}


def logits(model, x, mask):
    with torch.no_grad():
        return model(x, attention_mask=mask, use_cache=False).logits[mask.bool()]


def goes_the_whole_way(model, encoder, batch, near, folder):
    """Graft, save, load by the Auto class alone, compare, continue from dynamic and static caches."""
    x, mask = batch
    auto = "AutoModelForMaskedLM" if encoder else "AutoModelForCausalLM"
    wanted = logits(model, x, mask)
    settings = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    written = None if encoder else model.generate(x, **settings)
    model = graft(model, "iha", pseudo_heads=2)
    assert model.graft_report.exact
    near(logits(model, x, mask), wanted, ROUNDING)
    model.save_pretrained(folder)
    assert is_causal(AutoConfig.from_pretrained(folder)) != encoder
    back = getattr(modeling_auto, auto).from_pretrained(folder)
    assert type(back) is type(model) and back.grafted()
    near(logits(back, x, mask), wanted, ROUNDING)
    if not encoder:
        for cache in ("dynamic", "static"):
            assert torch.equal(back.generate(x, cache_implementation=cache, **settings), written), cache


def test_as_published(base, encoder, batch, near, tmp_path):
    goes_the_whole_way(base(published=True, dtype=torch.float32), encoder, batch, near, tmp_path)


@pytest.mark.parametrize("name", SWITCHED, indirect=True)
def test_with_switches(name, base, batch, near, tmp_path):
    goes_the_whole_way(base(dtype=torch.float32, **SWITCHED[name]), False, batch, near, tmp_path)


def test_the_smallest_gpt2(tmp_path):
    """By the names that its config class has, and no other attribute."""
    from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=37)).eval()
    x = torch.arange(9)[None]
    model = graft(model, "iha", pseudo_heads=2)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(back(x).logits, model(x).logits, rtol=0, atol=1e-6)
