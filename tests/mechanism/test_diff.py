"""Differential attention against the loop oracle; its reductions, lambda, cost, cache and maps."""

import math

import pytest
import torch
from oracles import diff as oracle
from oracles.common import settings
from oracles.compare import COMMON_OPTIONS, assert_close, assert_matches, draw, randomise, sides
from torch.nn.functional import rms_norm

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.mechanism import build_from_config, make_config
from headloom.ops import scores

MHA = {"hidden_size": 11, "num_heads": 4, "head_dim": 6}
GQA = {"hidden_size": 11, "num_heads": 12, "num_kv_heads": 4, "head_dim": 4}
KINDS = ["left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents", "documents_win"]
OPTIONS = {
    **COMMON_OPTIONS,
    "default": {},
}


def build(base, options, layer=0, seed=0):
    merged = {**base, **options}
    module = build_from_config(make_config("diff", **merged), layer)
    s = settings("diff", **merged)
    s.layer = layer
    return randomise(module.double(), seed, 0.4).eval(), s


@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, base):
    module, s = build(base, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, causal, window):
    module, s = build(GQA, {"causal": causal, "window": window})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("layer", [1, 5])
def test_lambda_init_follows_the_layer(layer):
    module, s = build(MHA, {}, layer=layer)
    assert_matches(module, oracle, s, draw(2, 5, 11))
    assert module.lambda_init == pytest.approx({1: 0.355509, 5: 0.666122}[layer], abs=1e-6)


def test_initial_lambda():
    """lambda_init of layer 0 is 0.2; the vectors are N(0, 0.1), the norm's weight 1."""
    torch.manual_seed(0)
    module = hl.attention("diff", hidden_size=8, num_heads=2, head_dim=4000)
    vectors = [getattr(module, f"lambda_{x}").weight.detach() for x in ("q1", "k1", "q2", "k2")]
    assert all(abs(float(x.std()) - 0.1) < 0.005 and abs(float(x.mean())) < 0.006 for x in vectors)
    assert (module.head_norm.weight == 1).all() and module.head_norm.eps == 1e-5
    with torch.no_grad():
        for x in vectors:
            x.zero_()
    assert float(module.strength().detach()) == pytest.approx(0.2)


def settle(module, value):
    """lambda = value."""
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(module, name).weight.zero_()
        first = value + 1 - module.lambda_init  # exp(first product) - exp(0) + lambda_init = value
        module.lambda_k1.weight[0] = 1.0
        module.lambda_q1.weight[0] = math.log(first)
        if first <= 0:
            raise ValueError(value)


@pytest.mark.parametrize("kind", ["left", "documents"])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}, {"num_kv_heads": 2}])
def test_lambda_zero_is_the_first_of_each_pair_normed(options, kind):
    """mha (or gqa) of the heads 0, 2, ... with values twice as wide, then the norm times 1 - lambda_init, then W_O."""
    module, _ = build(MHA, options)
    settle(module, 0.0)
    pairs, kv_pairs = 2, module.config.num_kv_heads // 2
    name = "mha" if pairs == kv_pairs else "mqa"
    wide = {**MHA, **options, "num_heads": pairs, "num_kv_heads": kv_pairs, "value_dim": 12}
    plain = hl.attention(name, **wide).double()
    with torch.no_grad():
        plain.q_proj.weight.copy_(module.q_proj.weight.reshape(pairs, 2, 6, 11)[:, 0].reshape(-1, 11))
        plain.k_proj.weight.copy_(module.k_proj.weight.reshape(kv_pairs, 2, 6, 11)[:, 0].reshape(-1, 11))
        plain.v_proj.weight.copy_(module.v_proj.weight)
        plain.o_proj = torch.nn.Identity()
    x = draw(2, 5, 11)
    heads = plain(x, **sides(kind)).unflatten(-1, (pairs, 12))
    normed = rms_norm(heads, (12,), module.head_norm.weight, 1e-5) * (1 - module.lambda_init)
    assert_close(module(x, **sides(kind)).detach(), module.o_proj(normed.flatten(2)).detach(), "lambda 0", 1e-12)


def test_equal_pairs_at_lambda_one_cancel():
    module, _ = build(MHA, {})
    settle(module, 1.0)
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            pairs = projection.weight.view(2, 2, 6, 11)
            pairs[:, 1] = pairs[:, 0]
    assert module(draw(2, 5, 11)).abs().max() < 1e-10


def test_stays_fused():
    module, _ = build(GQA, {"window": 3})
    with scores.paths() as ran:
        module(draw(2, 7, 11))
    assert dict(ran) == {"fused": 2}


def test_patterns_and_the_effective_map():
    """Rows of patterns sum to 1, of the difference to 1 - lambda; the map times the values, normed, is the output."""
    module, _ = build(GQA, {})
    x, real = draw(2, 5, 11), torch.ones(2, 5, dtype=torch.bool)
    real[0, :2] = False
    maps = module.maps(x, padding=real)
    assert maps.patterns.shape == (2, 12, 5, 5) and maps.effective.shape == (2, 6, 2, 5, 5)
    lam = float(oracle.strength({n: p.detach() for n, p in module.named_parameters()}, 0)[0])
    assert float(module.strength().detach()) == pytest.approx(lam, abs=1e-12)
    sums = maps.effective.sum((2, 4))
    assert (sums[0, :, :2] == 0).all() and (sums[1] - (1 - lam)).abs().max() < 1e-12
    v = module.v_proj(x).unflatten(-1, (2, 8)).transpose(1, 2)
    heads = torch.einsum("bhgts,bgsv->bthv", maps.effective, v)
    normed = rms_norm(heads, (8,), module.head_norm.weight, 1e-5) * (1 - 0.2)
    assert_close(module(x, padding=real).detach(), module.o_proj(normed.flatten(2)).detach(), "map", 1e-12)


@pytest.mark.parametrize("T", [8, 32])
def test_costs_equal_the_closed_form(T):
    D, H, G, K, V = 96, 8, 4, 16, 12
    sizes = {"hidden_size": D, "num_heads": H, "num_kv_heads": G, "head_dim": K, "value_dim": V}
    found = hl.cost("diff", tokens=T, **sizes)
    weights = D * (H * K + G * K + G * V + H * V)
    assert found.parameters == weights + 4 * K + 2 * V
    assert found.cache_elements_per_token == G * (K + V)
    pairs = T * (T + 1) // 2
    assert found.flops_exact == 2 * T * weights + 2 * pairs * H * (K + 2 * V)
    assert found.flops_full == 2 * T * weights + 2 * T * T * H * (K + 2 * V)
    assert hl.cost("diff", tokens=T, **{**sizes, "window": 1}).flops_exact == 2 * T * weights + 2 * T * H * (K + 2 * V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits_stay_finite(dtype):
    module = hl.attention("diff", **GQA)
    with torch.no_grad():
        module.q_proj.weight.mul_(60)
        module.k_proj.weight.mul_(60)
    x = draw(2, 9, 11).float()
    q, k = module.project(x)
    assert (q[:, :1] @ k["k"][:, :1].mT).abs().max() / 2 > 1e3
    module, x = module.to(dtype), x.to(dtype).requires_grad_()
    out = module(x)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_heads": 3, "head_dim": 4}, ["num_heads", "even", "3"]),
        ({"num_kv_heads": 1}, ["num_kv_heads", "even", "1", "diff2"]),
        ({"base": "mqa"}, ["mqa", "gqa", "mha"]),
        ({"base": "mla"}, ["mla", "gqa", "mha"]),
        ({"lambda_init": 0.1}, ["lambda_init"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("diff", **{"hidden_size": 16, "num_heads": 4, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_cached_generation_and_grafts():
    """A model of it writes the same with and without a cache; a graft is refused, or allowed to change."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headloom.hf import build_model

    sizes = {"vocab_size": 37, "hidden_size": 24, "head_dim": 6, "intermediate_size": 29}
    model = build_model(("diff", {"num_kv_heads": 2}), num_layers=2, num_heads=4, max_positions=64, **sizes)
    model = randomise(model.double(), 0, 0.6).eval()
    ids, real = torch.randint(3, 37, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    real[0, :4] = 0
    call = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, use_cache=True, **call), model.generate(ids, use_cache=False, **call))
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    llama = LlamaForCausalLM(config)
    with pytest.raises(
        HeadloomError, match=r"^diff does not start as the attention it replaces: pass allow_change=True"
    ):
        hl.graft(llama, "diff")
    assert [layer.self_attn.layer_index for layer in model.model.layers] == [0, 1]
    assert hl.graft(llama, "diff", allow_change=True).graft_report.exact is False
