"""bilinear: the loop oracle, the pairs of features it can pick, its case of low rank, counts, bad input."""

import math

import pytest
import torch
from oracles import bilinear as oracle
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError

SIZES = {"hidden_size": 5, "num_heads": 3}
OPTIONS = {
    "default": {},
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window3": {"window": 3},
    "encoder_window": {"causal": False, "window": 2},
    "one_channel": {"num_heads": 1},
    "the_bound": {"num_heads": 5},
    "channels": {"num_heads": 4, "channels": 2},
    "softcap": {"softcap": 0.7},
    "out_bias": {"out_bias": True},
    "scale": {"scale": 0.3},
    "identity": {"score": "identity"},
    "hard": {"score": "hard"},
    "bit": {"projection": "bit", "out_bias": True},
}
KINDS = ["left", "right", "holes", "documents", "alternating", "restart", "padded_documents", "padded_restart"]


def build(**options):
    merged = {**SIZES, **options}
    module = randomise(hl.attention("bilinear", **merged).double()).eval()
    return module, settings("bilinear", **merged)


@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, kind):
    module, s = build(**options)
    assert_matches(module, oracle, s, draw(2, 5, 5), **sides(kind))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, causal):
    module, s = build(causal=causal)
    assert_matches(module, oracle, s, draw(2, 5, 5), **sides(kind))


def test_unit_matrices_pick_single_pairs_of_features():
    """D = 2, H = 4, the four unit matrices: the logits are ac, ad, bc, bd over sqrt 2 of x_i = (a, b), x_j = (c, d)."""
    module = hl.attention("bilinear", hidden_size=2, num_heads=4, score="identity", causal=False).double()
    with torch.no_grad():
        for channel, (row, column) in enumerate([(0, 0), (0, 1), (1, 0), (1, 1)]):
            W = torch.zeros(2, 2)
            W[row, column] = 1
            module.q_proj.weight[2 * channel : 2 * channel + 2] = W.T
    a, b, c, d = 2.0, 3.0, 5.0, 7.0
    logits = module.maps(torch.tensor([[[a, b], [c, d]]], dtype=torch.float64)).patterns[0, :, 0, 1]
    want = torch.tensor([a * c, a * d, b * c, b * d], dtype=torch.float64) / math.sqrt(2)
    assert_close(logits, want, "logits", 1e-14)


def test_channels_of_rank_k_are_multi_query_heads():
    """W_c = W_Q,c W_K^T and U_c = W_V W_O,c of width K < D: mqa without rotary, whose scale is 1/sqrt K."""
    D, H, K = 7, 3, 2
    mqa = randomise(hl.attention("mqa", hidden_size=D, num_heads=H, head_dim=K, rope_theta=None).double())
    module = hl.attention("bilinear", hidden_size=D, num_heads=H, scale=1 / math.sqrt(K)).double()
    q, k = mqa.q_proj.weight.view(H, K, D), mqa.k_proj.weight
    o, v = mqa.o_proj.weight.view(D, H, K), mqa.v_proj.weight
    with torch.no_grad():
        module.q_proj.weight.copy_(torch.einsum("hkd,ke->hed", q, k).reshape(H * D, D))
        module.o_proj.weight.copy_(torch.einsum("ehk,kd->ehd", o, v).reshape(D, H * D))
    x = draw(2, 6, D)
    assert_close(module(x).detach(), mqa(x).detach(), "low rank", 1e-12)


def test_the_cache_holds_the_tokens_themselves():
    module, _ = build()
    x, cache = draw(2, 6, 5), hl.Cache()
    parts = [module(x[:, a:b], cache=cache) for a, b in ((0, 3), (3, 4), (4, 6))]
    assert torch.equal(cache.held(0).slots["x"][:, 0], x)
    assert_close(torch.cat(parts, 1).detach(), module(x).detach(), "cached", 1e-12)


def test_counts_are_the_closed_forms():
    D, H, T = 48, 5, 13
    found = hl.cost("bilinear", hidden_size=D, num_heads=2, channels=H, tokens=T)
    assert found.parameters == 2 * H * D * D and found.cache_elements_per_token == D
    assert found.flops_exact == 2 * (T * 2 * H * D * D + T * (T + 1) // 2 * H * 2 * D)
    assert found.flops_full == 2 * (T * 2 * H * D * D + T * T * H * 2 * D)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_stay_finite(dtype):
    module = hl.attention("bilinear", **SIZES, scale=1.0).to(dtype)
    with torch.no_grad():
        module.q_proj.weight.fill_(20.0)
    x = (draw(2, 6, 5) * 3).to(dtype).requires_grad_()
    call = module._prepare(x)
    assert (call.q.float() @ call.handle.k.float().mT).abs().max() > 1e3
    out = module(x)
    out.float().sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()


def test_maps_give_the_output():
    module, _ = build()
    x = draw(1, 6, 5)
    heads = module.maps(x).effective[0, :, 0] @ x[0]
    assert_close(module.o_proj(heads.transpose(0, 1).flatten(1)).detach(), module(x)[0].detach(), "maps", 1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rope_theta": 10000.0}, ["no rotary", "rope_theta must be None", "10000"]),
        ({"head_dim": 4}, ["head_dim", "5", "4", "leave"]),
        ({"value_dim": 3}, ["value_dim", "5", "3", "leave"]),
        ({"num_kv_heads": 3}, ["one key/value head", "3", "leave"]),
        ({"qk_norm": "head"}, ["qk_norm", "None", "head"]),
        ({"channels": 0}, ["channels", "0"]),
        ({"qkv_bias": True}, ["qkv_bias", "false"]),
        ({"base": "gqa"}, ["base", "gqa", "bilinear"]),
        ({"num_heads": "3"}, ["num_heads", "3"]),
    ],
)
def test_bad_options_say_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("bilinear", **{**SIZES, **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_model_gives_it_what_it_has_a_use_for():
    """A model's rotary and head width reach the layers that have them; the model saves and generates."""
    sizes = {"hidden_size": 24, "num_heads": 4, "head_dim": 6, "intermediate_size": 20, "max_positions": 32}
    specs = [("bilinear", {}), ("mha", {})]
    model = hl.build_model(specs, vocab_size=29, num_layers=2, rope_theta=500.0, **sizes).double().eval()
    first, second = (layer.self_attn for layer in model.model.layers)
    assert first.rotary is None and first.config.head_dim == 24
    assert second.config.rope_theta == 500.0 and second.config.head_dim == 6
    randomise(model, spread=0.3)
    ids = torch.randint(3, 29, (2, 4), generator=torch.Generator().manual_seed(0))
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    assert torch.equal(*(model.generate(ids, use_cache=use, **how) for use in (True, False)))
