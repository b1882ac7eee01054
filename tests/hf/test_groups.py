"""Optimizer groups: mixes, norms and biases without decay, every parameter once."""

import pytest
import torch

from headloom.hf import build_model, graft, mix_names, parameter_groups
from headloom.hf.grafting.groups import mix_groups

SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 31,
    "max_positions": 8,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", ["mha", "iha", "sas"])
def test_every_parameter_stands_in_one_group_once(name, tied):
    model = build_model((name, {"qkv_bias": True}), **SIZES, tie_embeddings=tied)
    decayed, spared = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    names = {id(p): n for n, p in model.named_parameters()}
    assert sorted(id(p) for g in (decayed, spared) for p in g["params"]) == sorted(names)
    in_spared = {names[id(p)] for p in spared["params"]}
    assert in_spared == {n for n, p in model.named_parameters() if "_mix" in n or "norm" in n or n.endswith("bias")}
    in_decayed = {names[id(p)] for p in decayed["params"]}
    assert {"model.embed_tokens.weight", "model.layers.0.self_attn.o_proj.weight"} <= in_decayed
    torch.optim.AdamW([decayed, spared], lr=1e-3).step()


def test_frozen_parameters_are_left_out(llama):
    model = llama()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model = graft(model, "iha", pseudo_heads=2)
    decayed, spared = parameter_groups(model, 0.1)
    assert not decayed["params"] and len(spared["params"]) == 3 * 4


def test_mixes_at_a_rate_of_their_own(llama):
    """All that `mix_names` names, SAS's convolutions and MLPs too, each with the weight decay it has anyway."""
    model = llama(num_hidden_layers=2)
    model = graft(model, layers={"0": ("sas", {"simulated_heads": 8}), "1": ("iha", {"pseudo_heads": 2})})
    names = tuple(f".{name}." for name in mix_names(model))
    wanted = {id(p) for name, p in model.named_parameters() if any(part in name for part in names)}
    usual = {id(p): g["weight_decay"] for g in parameter_groups(model, 0.1) for p in g["params"]}
    groups = mix_groups(model, 0.1, 0.5)
    assert {id(p) for group in groups if group.get("lr") == 0.5 for p in group["params"]} == wanted
    assert sum(len(group["params"]) for group in groups) == len(usual) > len(wanted) > 20
    assert all(usual[id(p)] == group["weight_decay"] for group in groups for p in group["params"])
    assert "lr" not in groups[0], "what is recorded as the rate is the first group's"
