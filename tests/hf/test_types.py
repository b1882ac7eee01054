"""Mixes are float32 whatever the model's type and however it came to it."""

import pytest
import torch
from published import default_config
from transformers import AutoModelForCausalLM
from transformers.models.auto import modeling_auto

import headloom as hl
from headloom.hf import build_model
from headloom.hf.model.classes import register_heads
from headloom.hf.model.config import grafted_config
from headloom.hf.model.family import families
from headloom.mechanism import mechanisms
from headloom.ops.mixing import Mix

HALVES = [torch.bfloat16, torch.float16]


def mixes(model):
    """Name -> mix, of a model or an attention."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Mix)}


MIXED = [name for name, info in mechanisms().items() if mixes(info.cls(info.config_cls.tiny()))]


def check(model, half):
    """Mixes are float32 and everything else of the attentions is of the half type."""
    found = mixes(model)
    assert found and {mix.weight.dtype for mix in found.values()} == {torch.float32}
    for attention in model.grafted():
        others = {
            p.dtype for name, p in attention.named_parameters() if not name.startswith(tuple(attention.simulating))
        }
        assert others == {half}
    assert model.dtype == half


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("family", list(families()))
def test_from_config(family, half, tmp_path):
    """Made in a half type, cast to it and loaded in it: initial values are not rounded, and loaded ones are kept."""
    register_heads(families()[family])
    config = grafted_config(
        default_config(family, num_hidden_layers=1), [{"mechanism": "iha", "options": {"pseudo_heads": 2}}]
    )
    auto = getattr(modeling_auto, "AutoModelForCausalLM" if families()[family].causal(config) else "AutoModel")
    model = auto.from_config(config, dtype=half)
    check(model, half)
    mix = model.grafted()[0].v_mix.weight
    assert not torch.equal(mix, mix.to(half).float())
    wide = auto.from_config(config, dtype=torch.float32)
    wide.save_pretrained(tmp_path)
    for narrow in (auto.from_pretrained(tmp_path, dtype=half), wide.to(half)):
        check(narrow, half)
        assert torch.equal(narrow.grafted()[0].v_mix.weight, wide.grafted()[0].v_mix.weight)
    assert auto.from_config(config, dtype=torch.float64).grafted()[0].v_mix.weight.dtype == torch.float64


@pytest.mark.parametrize("mechanism", MIXED)
def test_every_mechanism_with_mixes(mechanism, tmp_path):
    options = {"pseudo_heads": 2} if mechanism == "iha" else {}
    sizes = {"hidden_size": 16, "num_layers": 1, "num_heads": 4, "intermediate_size": 8}
    model = build_model((mechanism, options), vocab_size=17, max_positions=16, **sizes)
    model.save_pretrained(tmp_path)
    for half in HALVES:
        check(AutoModelForCausalLM.from_config(model.config, dtype=half), half)
        check(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=half), half)
    check(model.half(), torch.float16)


def test_under_a_default_type():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        attention = hl.attention("iha", hidden_size=8, num_heads=2, pseudo_heads=2)
    finally:
        torch.set_default_dtype(before)
    assert attention.q_mix.weight.dtype == torch.float32 and attention.q_proj.weight.dtype == torch.bfloat16
