"""Mixtral: a mixture-of-experts backbone around any mechanism, its own graft and our own build."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from headloom.core.errors import HeadloomError
from headloom.costs.count import model_flops
from headloom.hf import build_model, graft
from headloom.mechanism import mechanisms

SIZES = {
    "vocab_size": 41,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "intermediate_size": 29,
    "max_positions": 64,
    "family": "mixtral",
}


def same_logits(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-9)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 4}, {"head_dim": None, "num_key_value_heads": 4}])
@pytest.mark.parametrize("spec", [("iha", {"pseudo_heads": 2}), ("sas", {"simulated_heads": 8})])
def test_a_graft_keeps_the_function(mixtral, ids, spec, changes):
    base, x = mixtral(**changes), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    wanted = base(x, attention_mask=mask).logits
    before = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    base = graft(base, spec[0], layers="0,2", **spec[1])
    report = base.graft_report
    assert report.exact and report.relative < 1e-12 and report.parameters_added > 0
    same_logits(base(x, attention_mask=mask).logits[mask.bool()], wanted[mask.bool()])
    assert all(torch.equal(base.state_dict()[name], tensor) for name, tensor in before.items())
    assert base.model.layers[0].self_attn.config.window == changes.get("sliding_window")
    assert type(base.model.layers[1].self_attn).__name__ == "MixtralAttention"


def test_a_graft_multiplies_experts_as_before(mixtral):
    base = mixtral()
    base.set_experts_implementation("batched_mm")
    base = graft(base, "iha", pseudo_heads=2)
    assert base.config._experts_implementation == "batched_mm"
    base.set_experts_implementation("eager")


def test_a_window_is_not_dropped_by_an_option(mixtral):
    with pytest.raises(HeadloomError, match="window=None does not start as the attention it replaces"):
        graft(mixtral(sliding_window=4), "iha", pseudo_heads=2, window=None)


def test_a_graft_is_saved_exactly(mixtral, ids, tmp_path):
    model, x = mixtral(), ids(2, 7)
    model = graft(model, "iha", pseudo_heads=2)
    for attention in model.grafted():
        torch.nn.init.normal_(attention.k_mix.weight)
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["family"] == "mixtral" and written["backbone"]["num_local_experts"] == 5
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert type(back) is type(model) and not info["missing_keys"] and not info["unexpected_keys"]
    own, loaded = model.state_dict(), back.state_dict()
    assert list(own) == list(loaded) and all(torch.equal(own[name], loaded[name]) for name in own)
    back.set_experts_implementation("eager")
    same_logits(back(x).logits, model(x).logits)
    assert torch.equal(back.generate(x, max_new_tokens=4), model.generate(x, max_new_tokens=4))


@pytest.mark.parametrize("name", list(mechanisms()))
def test_any_mechanism_stands_in_it(routed, ids, name, tmp_path):
    """Our own build: every step of a cached run equals the whole, and a saved folder comes back."""
    model, x = routed((name, {})), ids(2, 8)
    assert type(model).__name__ == "HeadloomMixtralForCausalLM"
    whole = model(x, use_cache=False).logits
    cache, steps = None, []
    for t in range(8):
        out = model(x[:, t : t + 1], cache=cache, use_cache=True)
        cache = out.cache
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-8)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in model.state_dict().items())
    loss = model.train()(x, labels=x).loss
    loss.backward()
    assert model.model.layers[0].mlp.experts.down_proj.grad.abs().sum() > 0


def test_experts_are_counted_and_seeded():
    model = build_model(("mha", {}), **SIZES, experts=5)
    E, D, F = 5, 24, 29
    mlp = model.model.layers[1].mlp
    assert sum(p.numel() for p in mlp.parameters()) == E * 3 * D * F + E * D and mlp.top_k == 2
    assert 0.018 < mlp.experts.gate_up_proj.std() < 0.022
    again = build_model(("iha", {"pseudo_heads": 2}), **SIZES, experts=5).model.layers[1].mlp
    assert all(torch.equal(a, b) for a, b in zip(mlp.parameters(), again.parameters(), strict=True))
    published = build_model(("mha", {}), **SIZES, device="meta").config
    assert (published.num_local_experts, published.num_experts_per_tok) == (8, 2)


def test_operations_are_counted():
    """A token passes through the router and two of five feed-forwards instead of through one."""
    sizes = {key: value for key, value in SIZES.items() if key != "family"}
    plain = build_model(("mha", {}), **sizes, device="meta")
    model = build_model(("mha", {}), **SIZES, experts=5, device="meta")
    E, D, F, layers, T = 5, 24, 29, 2, 8
    extra = layers * T * (2 * D * E + 2 * 3 * D * F)
    assert model_flops(model, T) == model_flops(plain, T) + extra


@pytest.mark.parametrize(("width", "product"), [(29, "eager"), (32, "grouped_mm")])
def test_experts_are_multiplied_together_where_widths_allow(width, product, tmp_path):
    """Loaded as built, and equal to transformers' own class, in float32."""
    model = build_model(("mha", {}), **{**SIZES, "intermediate_size": width}).eval()
    x = torch.arange(20).view(2, 10)
    model(x, labels=x).loss.backward()
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.config._experts_implementation == back.config._experts_implementation == product
    torch.testing.assert_close(back(x).logits, model(x).logits)


def test_layers_with_windows_of_their_own(routed, ids):
    """W = 3 in layer 0 only: with one layer a token sees three, through both layers all; cached equals whole."""
    specs = [("iha", {"pseudo_heads": 2, "window": 3}), ("mha", {})]
    model, x = routed(specs), ids(1, 9)
    assert model.config.sliding_window is None
    assert routed(specs[:1], num_layers=1).config.sliding_window == 3
    whole = model(x, use_cache=False).logits
    start = model(x[:, :6], use_cache=True)
    rest = model(x[:, 6:], cache=start.cache, use_cache=True).logits
    same_logits(rest, whole[:, 6:])
    moved = x.clone()
    moved[0, 0] = 36 - moved[0, 0]
    assert (model(moved, use_cache=False).logits[0, -1] - whole[0, -1]).abs().max() > 1e-6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": 0}, "experts must be an int of at least 1, not 0"),
        ({"experts": 2, "experts_per_token": 3}, "experts_per_token must be from 1 to the number of experts 2, not 3"),
        ({"family": "llama", "experts": 5}, "a llama model has one feed-forward a layer, came experts=5"),
        ({"family": "mixtrall"}, "model family 'mixtrall' is not known here"),
    ],
)
def test_experts_that_do_not_fit(changes, message):
    with pytest.raises(HeadloomError, match=message):
        build_model(("mha", {}), **{**SIZES, **changes})
