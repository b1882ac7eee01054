"""SmolLM2-135M, a Llama of 30 layers and 9 heads over 3 key/value heads, grafted: it says what it said."""

import pytest
import torch
from transformers import AutoModelForCausalLM

import headloom as hl
from headloom.hf import checkpoints, generation

pytestmark = pytest.mark.real
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def plain(smollm2):
    found = checkpoints.load_checkpoint(smollm2)
    ids = found.tokenizer(PROMPT, return_tensors="pt").input_ids
    with torch.no_grad():
        return generation.generate(found, PROMPT, max_new_tokens=8).text, found.model(ids).logits, ids


def test_the_checkpoint_is_plain(smollm2, plain):
    config = AutoModelForCausalLM.from_pretrained(smollm2).config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert not hasattr(config, "quantization_config")
    assert " Paris" in plain[0]


def test_iha_keeps_the_continuation_and_comes_back_from_disk(smollm2, plain, tmp_path):
    text, logits, ids = plain
    found = checkpoints.load_checkpoint(smollm2)
    found.model = hl.graft(found.model, "iha", pseudo_heads=2)
    report = found.model.graft_report
    assert report.exact and report.relative < 2e-4
    assert report.parameters_added == 30 * (2 * 9 * (9 + 2 * 3) + 9 * 9 * 2)  # P H (H + 2 G) + H^2 P a layer
    spread = float(logits.max() - logits.min())
    torch.testing.assert_close(found.model(ids).logits, logits, rtol=0, atol=2e-4 * spread)
    assert generation.generate(found, PROMPT, max_new_tokens=8).text == text
    checkpoints.save_checkpoint(found, tmp_path / "graft")
    again = checkpoints.load_checkpoint(tmp_path / "graft")
    assert again.model.config.headloom["layers"][29]["options"]["pseudo_heads"] == 2
    torch.testing.assert_close(again.model(ids).logits, found.model(ids).logits, rtol=0, atol=1e-6 * spread)
    assert generation.generate(again, PROMPT, max_new_tokens=8, cache="static").text == text


def test_one_pseudo_head_folds_back(smollm2, plain):
    _, logits, ids = plain
    found = checkpoints.load_checkpoint(smollm2)
    found.model = hl.graft(found.model, "iha", pseudo_heads=1, layers="3-5")
    generator = torch.Generator().manual_seed(0)
    for parameter in (p for n, p in found.model.named_parameters() if "_mix" in n):
        parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    grafted = found.model(ids).logits
    assert (grafted - logits).abs().max() > 0.1, "the mixes matter"
    found.model = hl.fold(found.model)
    report = found.model.fold_report
    assert (report.kv_heads_before, report.kv_heads) == (3, 9)
    spread = float(grafted.max() - grafted.min())
    torch.testing.assert_close(found.model(ids).logits, grafted, rtol=0, atol=2e-4 * spread)
