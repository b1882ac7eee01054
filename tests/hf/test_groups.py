"""Optimizer groups (case 13): mixes, norms and biases without decay, every parameter once."""

import pytest
import torch

from headloom.hf import build_model, graft, parameter_groups

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
    graft(model, "iha", pseudo_heads=2)
    decayed, spared = parameter_groups(model, 0.1)
    assert not decayed["params"] and len(spared["params"]) == 3 * 4
