"""DeltaFormer against the loop oracle: both stages, blocks, masks, caches, its reduction, costs and refusals."""

import pytest
import torch
from oracles import deltaformer as oracle
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, assert_rounds, draw, randomise, sides
from oracles.modules import training_peak

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops import delta

MHA = {"hidden_size": 11, "num_heads": 3, "head_dim": 4}
GQA = {**MHA, "num_heads": 6, "num_kv_heads": 2}
KINDS = ["plain", "left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
KINDS += ["padded_restart", "documents_win"]
OPTIONS = {
    "window1": {"window": 1},
    "window2": {"window": 2},
    "window3": {"window": 3},
    "no_rotary": {"rope_theta": None},
    "rotary2": {"rotary_dim": 2, "rope_theta": 20.0},
    "norm_head": {"qk_norm": "head"},
    "norm_width": {"qk_norm": "width", "norm_eps": 0.2},
    "softcap": {"softcap": 0.7},
    "narrow_values": {"value_dim": 3},
    "wide_values": {"value_dim": 7, "window": 2},
    "biases": {"qkv_bias": True, "out_bias": True},
    "scale": {"scale": 0.3},
    "negative_scale": {"scale": -0.4, "window": 3},
    "hard": {"score": "hard"},
    "identity": {"score": "identity"},
    "bit": {"projection": "bit"},
    "odd_width": {"head_dim": 5, "rope_theta": None},
}


@pytest.fixture(params=[128, 2, 3], ids=["one_block", "blocks_of_2", "blocks_of_3"])
def block(request, monkeypatch):
    """Five tokens in one block, and in blocks of 2 and 3 with a rest."""
    monkeypatch.setattr(delta, "BLOCK", request.param)


def build(base, options):
    merged = {**base, **options}
    return randomise(hl.attention("deltaformer", **merged).double()).eval(), settings("deltaformer", **merged)


@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, base, block):
    module, s = build(base, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, window, block):
    module, s = build(GQA, {"window": window})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def test_blocks_that_the_fused_kernel_does(monkeypatch):
    """Forty tokens in blocks of 17: earlier blocks are read by the fused kernel, with and without a mask."""
    monkeypatch.setattr(delta, "BLOCK", 17)
    real = torch.ones(1, 40, dtype=torch.bool)
    real[0, :3] = False
    for options, side in (({}, {}), ({"window": 9}, {}), ({"value_dim": 6}, {"padding": real})):
        module, s = build({**MHA, "num_heads": 1}, options)
        assert_matches(module, oracle, s, draw(1, 40, 11), **side)


def test_pairs_that_are_masked_out(block):
    """A given rule per pair holds in both stages; a row without any pair keeps u = v and returns 0."""
    module, _ = build(GQA, {})
    x = draw(1, 5, 11)
    pairs = torch.ones(1, 5, 5, dtype=torch.bool)
    pairs[0, 3] = False
    out = module(x, mask=hl.Dense(pairs)).detach()
    assert (out[0, 3] == 0).all()
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    same = documents[:, :, None] == documents[:, None, :]
    want = module(x, documents=documents).detach()
    assert_close(module(x, mask=hl.Dense(same)).detach(), want, "pairs as documents", 1e-12)


def test_three_tokens_by_hand():
    """u_0 = v_0, u_1 = v_1 - beta_1 v_0, u_2 = v_2 - beta_2 (w u_0 + (1 - w) u_1), w = sigmoid of the logits' gap."""
    k, v = draw(1, 3, 4)[:, None], draw(1, 3, 2, seed=3)[:, None]
    beta = torch.tensor([[[9.0, 0.5, 2.0]]], dtype=torch.float64)
    from headloom.ops.masks import Visibility

    u = delta.solve(k, v, beta, Visibility(3, 3), 0.5)[0, 0]
    one = v[0, 0, 1] - 0.5 * v[0, 0, 0]
    w = torch.sigmoid(0.5 * (k[0, 0, 2] @ k[0, 0, 0] - k[0, 0, 2] @ k[0, 0, 1]))
    two = v[0, 0, 2] - 2.0 * (w * v[0, 0, 0] + (1 - w) * one)
    assert_close(u, torch.stack([v[0, 0, 0], one, two]), "by hand", 1e-14)


@pytest.mark.parametrize("kind", ["plain", "left", "documents"])
@pytest.mark.parametrize("options", [{}, {"window": 2}, {"qk_norm": "head", "value_dim": 3}])
def test_a_fresh_one_is_exactly_the_base(options, kind):
    torch.manual_seed(0)
    module = hl.attention("deltaformer", **GQA, **options).double().eval()
    base = hl.attention("gqa", **GQA, **options).double().eval()
    assert module.config.exact
    base.load_state_dict({n: t for n, t in module.state_dict().items() if not n.startswith("beta_proj")})
    x = draw(2, 5, 11)
    assert_rounds(module(x, **sides(kind)), base(x, **sides(kind)), "fresh", terms=11)
    module(x).pow(2).sum().backward()
    assert all(p.grad.abs().max() > 0 for p in module.beta_proj.parameters())


def test_the_cache_remembers_u_and_passes_gradients_through_it():
    module, _ = build(GQA, {"value_dim": 3})
    x = draw(2, 7, 11)
    whole, parts = x.clone().requires_grad_(), x.clone().requires_grad_()
    want = module(whole)
    cache = hl.Cache()
    found = torch.cat([module(parts[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 7))], 1)
    assert_close(found.detach(), want.detach(), "cached", 1e-12)
    assert {n: tuple(t.shape) for n, t in cache.held(0).slots.items()} == {"k": (2, 2, 7, 4), "u": (2, 2, 7, 3)}
    want.pow(2).sum().backward()
    found.pow(2).sum().backward()
    assert_close(parts.grad, whole.grad, "gradient through the cache", 1e-10)


def test_maps_give_the_output():
    """out = concat_h(sum_g effective[h, g] v_g) W_O, with documents and with a window."""
    module, _ = build(GQA, {})
    x = draw(2, 5, 11)
    v = module.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
    for side in ({}, sides("documents"), {"mask": hl.Window(2)}):
        maps = module.maps(x, **side)
        out = torch.einsum("bhgts,bgsv->bthv", maps.effective, v).flatten(2)
        assert_close(module.o_proj(out).detach(), module(x, **side).detach(), "maps", 1e-12)
        assert_close(maps.patterns.sum(-1), torch.ones(2, 6, 5).double(), "rows", 1e-12)


@pytest.mark.parametrize(("window", "first", "second"), [(None, 120, 136), (5, 54, 70)])
def test_closed_form_costs(window, first, second):
    """T = 16: 120 pairs strictly before, 136 with oneself; with W = 5, 6 + 12 * 4 and 10 + 12 * 5."""
    D, H, G, K, V, T = 11, 6, 2, 4, 3, 16
    cost = hl.cost("deltaformer", **GQA, value_dim=V, tokens=T, window=window)
    projections = D * H * K + D * G * (K + V) + H * V * D
    assert cost.parameters == projections + D * G + G
    assert cost.cache_elements_per_token == G * (K + V)
    linear = 2 * T * (projections + D * G)
    assert cost.flops_exact == linear + 2 * (K + V) * (first * G + second * H)
    assert cost.flops_full == linear + 2 * (K + V) * T * T * (G + H)
    assert {p.step: p.flops_exact for p in cost.parts}["remember"] == 2 * (K + V) * first * G


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_thousand_stay_finite(dtype, block):
    module = hl.attention("deltaformer", **GQA).to(dtype)
    with torch.no_grad():
        module.k_proj.weight.mul_(30)
        module.q_proj.weight.mul_(30)
        module.beta_proj.weight.fill_(0.05)
    x = (3 * draw(1, 9, 11)).to(dtype).requires_grad_()
    k = module.k_proj(x).unflatten(-1, (2, 4)).float()
    assert (k.pow(2).sum(-1) / 2).max() > 1e3
    out = module(x)
    out.float().pow(2).mean().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"causal": False}, ["causal", "mha"]),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["dynamic", "yarn"]),
        ({"rope_scaling": {"rope_type": "longrope"}}, ["longrope", "linear"]),
        ({"num_kv_heads": 4}, ["4", "6"]),
        ({"window": 0}, ["window", "0"]),
        ({"bata": 1}, ["bata"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("deltaformer", **{**GQA, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_state_dict_names_and_shapes():
    shapes = {n: tuple(t.shape) for n, t in hl.attention("deltaformer", **GQA).state_dict().items()}
    assert shapes == {
        "q_proj.weight": (24, 11),
        "k_proj.weight": (8, 11),
        "v_proj.weight": (8, 11),
        "o_proj.weight": (11, 24),
        "beta_proj.weight": (2, 11),
        "beta_proj.bias": (2,),
    }


def test_memory_is_linear_in_the_tokens():
    """T = 4096, H = 8, forward and backward: one T x T matrix per head alone would be 512 MiB."""
    assert training_peak("deltaformer", 4096, hidden_size=128, num_heads=8, head_dim=16) < 64
