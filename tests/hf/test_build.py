"""Our own models: sizes, names, and initial values that depend on the seed and the name alone."""

import pytest
import torch
from torch import nn

from headloom.core.errors import HeadloomError
from headloom.hf import build_model
from headloom.mechanism import mechanisms

SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 31,
    "max_positions": 64,
}


def tensors(*args, **changes):
    return dict(build_model(*args, **{**SIZES, **changes}).named_parameters())


def test_a_model_has_llamas_names_and_the_mechanisms():
    names = tensors(("iha", {"pseudo_heads": 2}))
    layer = {name.removeprefix("model.layers.1.") for name in names if ".1." in name}
    own = {f"self_attn.{letter}_mix.weight" for letter in ("q", "k", "v", "out")}
    llama = {f"self_attn.{letter}_proj.weight" for letter in "qkvo"}
    llama |= {f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")}
    assert layer == own | llama | {"input_layernorm.weight", "post_attention_layernorm.weight"}
    assert set(names) - {n for n in names if ".layers." in n} == {"model.embed_tokens.weight", "model.norm.weight"}


def test_equal_names_and_shapes_have_equal_values():
    """Across mechanisms, feed-forward widths and depths; the global stream neither matters nor moves."""
    torch.manual_seed(7)
    state = torch.get_rng_state()
    models = [
        tensors(("mha", {})),
        tensors(("iha", {"pseudo_heads": 2}), intermediate_size=30),
        tensors([("sas", {}), ("mha", {}), ("gqa", {})], num_layers=3),
    ]
    assert torch.equal(torch.get_rng_state(), state)
    shared = 0
    for other in models[1:]:
        for name, tensor in models[0].items():
            if name in other and other[name].shape == tensor.shape:
                assert torch.equal(other[name], tensor), name
                shared += tensor.ndim > 1
    assert shared > 16
    assert not torch.equal(
        tensors(("mha", {}), seed=1)["model.embed_tokens.weight"], models[0]["model.embed_tokens.weight"]
    )
    first, second = (models[0][f"model.layers.{i}.self_attn.q_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)


def test_projections_start_as_llamas():
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_heads": 4}
    names = tensors(("iha", {"pseudo_heads": 2, "qk_norm": "head", "qkv_bias": True}), **sizes)
    for name, tensor in names.items():
        if "norm" in name:
            assert torch.equal(tensor, torch.ones_like(tensor)), name
        elif name.endswith("bias"):
            assert torch.equal(tensor, torch.zeros_like(tensor)), name
        elif "_mix" not in name:
            assert 0.019 < tensor.std() < 0.021 and tensor.mean().abs() < 1e-3, name
    eye = torch.eye(4)[:, None].expand(4, 2, 4)
    assert torch.equal(names["model.layers.0.self_attn.q_mix.weight"], eye)


def test_a_mechanisms_own_layers_start_its_own_way():
    model = build_model(("sas", {"kernel_size": 3}), **SIZES)
    fresh = mechanisms()["sas"].cls(model.model.layers[0].self_attn.config)
    for name, tensor in fresh.named_parameters():
        if "head_" in name or "feature_" in name:
            ours = model.get_parameter(f"model.layers.0.self_attn.{name}")
            assert ours.abs().max() < 2 * tensor.abs().max() and ours.std() > 0.5 * tensor.std(), name


def test_padding_starts_at_zero_and_ties_hold():
    model = build_model(("mha", {}), **SIZES, pad_token_id=5)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not model.model.embed_tokens.weight[5].any() and model.model.embed_tokens.weight[4].all()
    loose = build_model(("mha", {}), **SIZES, tie_embeddings=False)
    assert loose.lm_head.weight is not loose.model.embed_tokens.weight
    assert 0.018 < loose.lm_head.weight.std() < 0.022
    assert sum(p.numel() for p in loose.parameters()) - sum(p.numel() for p in model.parameters()) == 41 * 24


def test_meta_models_cost_no_memory():
    sizes = {"hidden_size": 4096, "num_heads": 32, "num_layers": 2, "intermediate_size": 11008, "vocab_size": 128256}
    model = build_model(("iha", {"pseudo_heads": 2}), **{**SIZES, **sizes}, device="meta")
    assert all(p.is_meta for p in model.parameters())
    H, P, D, F = 32, 2, 4096, 11008
    layer = 4 * D * D + 4 * H * H * P + 3 * D * F + 2 * D
    assert sum(p.numel() for p in model.parameters()) == 2 * layer + 128256 * D + D


def test_heads_need_not_divide_the_width():
    model = build_model(("gqa", {"num_kv_heads": 1}), **{**SIZES, "num_heads": 7, "head_dim": 6})
    assert model.model.layers[0].self_attn.q_proj.weight.shape == (42, 24)
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 41)


def test_sizes_reach_every_part():
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling["original_max_position_embeddings"] = 16
    model = build_model(("gqa", {"dropout": 0.1}), **SIZES, rope_theta=500.0, rope_scaling=scaling, norm_eps=1e-5)
    attention = model.model.layers[1].self_attn
    assert attention.config.num_kv_heads == model.config.num_key_value_heads == 1
    assert attention.config.rope_theta == model.config.rope_parameters["rope_theta"] == 500.0
    assert attention.config.rope_scaling["rope_type"] == model.config.rope_parameters["rope_type"] == "llama3"
    assert attention.config.norm_eps == model.config.rms_norm_eps == 1e-5
    assert attention.config.dropout == model.config.attention_dropout == 0.1
    assert attention.layer_index == 1
    assert build_model(("mha", {"rope_theta": None}), **SIZES).model.layers[0].self_attn.rotary is None


@pytest.mark.parametrize(
    ("specs", "changes", "message"),
    [
        (("ihaa", {}), {}, "unknown mechanism 'ihaa'. Did you mean 'iha'"),
        (("iha", {"pseudo_head": 2}), {}, "Did you mean 'pseudo_heads'"),
        ([("mha", {})], {}, "1 specs came for 2 layers"),
        (("mha", {}), {"num_layers": 0}, "num_layers must be at least 1"),
        (("mha", {}), {"hidden_size": 25}, "hidden_size 25 is no multiple of num_heads 4"),
        (("gqa", {}), {"num_kv_heads": 3}, "num_kv_heads must divide num_heads, came 3 and 4"),
    ],
)
def test_sizes_that_do_not_fit(specs, changes, message):
    with pytest.raises(HeadloomError, match=message):
        build_model(specs, **{**SIZES, **changes})


CALLS = {
    "cache": {"use_cache": True},
    "padding": {"attention_mask": torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [1] * 9])},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])},
}


@pytest.mark.parametrize("call", CALLS)
def test_one_graph(call):
    """The whole model compiles without a break, forward and backward."""
    torch._dynamo.reset()
    model, x = build_model(("iha", {"pseudo_heads": 2}), **{**SIZES, "num_layers": 1}), torch.arange(18).view(2, 9)
    mix, results = model.model.layers[0].self_attn.k_mix.weight, []
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        mix.grad = None
        out = run(x, labels=x, **{"use_cache": False, **CALLS[call]})
        out.loss.backward()
        results.append((out.logits, mix.grad))
    for wanted, got in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_the_loss_is_the_causal_one():
    model = build_model(("mha", {}), **SIZES).eval()
    x = torch.tensor([[3, 1, 4, 1, 5]])
    out = model(x, labels=x)
    wanted = nn.functional.cross_entropy(out.logits[0, :-1], x[0, 1:])
    torch.testing.assert_close(out.loss, wanted)
    assert model.loss_type == "ForCausalLM"


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"specs": 3}, "give a mechanism's name, (name, options), or a list of one per layer, not 3"),
        ({"specs": ["iha", 3]}, "a mechanism's name or (name, options), not 3"),
        ({"vocab_size": 0}, "vocab_size must be at least 1, not 0"),
        ({"intermediate_size": "x"}, "intermediate_size must be a whole number, not 'x'"),
        ({"max_positions": 2.5}, "max_positions must be a whole number, not 2.5"),
        ({"rope_scaling": "linear"}, "rope_scaling must be a mapping"),
        ({"device": "nowhere"}, "device must be one that PyTorch has here"),
        ({"pad_token_id": 99}, "pad_token_id must be an id below vocab_size 50 or None, not 99"),
        ({"tie_embeddings": "yes"}, "tie_embeddings must be true or false, not 'yes'"),
    ],
)
def test_wrong_arguments_are_one_sentence(given, part):
    sizes = {"hidden_size": 8, "num_layers": 2, "num_heads": 2, "intermediate_size": 8, "max_positions": 8}
    arguments = {"specs": "mha", "vocab_size": 50, **sizes, **given}
    with pytest.raises(HeadloomError) as caught:
        build_model(arguments.pop("specs"), **arguments)
    assert part in str(caught.value) and "\n" not in str(caught.value)
