"""mfa and mfa_kr: the loop oracle, the multi-query attention they are, the values made from keys, counts, bad input."""

import pytest
import torch
from oracles import mfa as oracle
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, assert_rounds, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError

SIZES = {"hidden_size": 11, "num_heads": 3, "head_dim": 7, "latent_dim": 6}
OPTIONS = {
    "default": {},
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window3": {"window": 3},
    "encoder_window": {"causal": False, "window": 2},
    "no_rotary": {"rope_theta": None, "latent_dim": 5},
    "rotary4": {"rotary_dim": 4, "rope_theta": 30.0},
    "norm_head": {"qk_norm": "head"},
    "norm_width": {"qk_norm": "width", "norm_eps": 0.3},
    "softcap": {"softcap": 0.7},
    "biases": {"qkv_bias": True, "out_bias": True},
    "scale": {"scale": 0.3},
    "identity": {"score": "identity"},
    "hard": {"score": "hard"},
    "default_width": {"latent_dim": None},
    "all": {"qkv_bias": True, "out_bias": True, "qk_norm": "head", "softcap": 1.1, "window": 3, "rotary_dim": 2},
}
KINDS = ["left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
NAMES = ["mfa", "mfa_kr"]


def build(name, **options):
    merged = {**SIZES, **options}
    return randomise(hl.attention(name, **merged).double()).eval(), settings(name, **merged)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["plain", "padded_restart"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(name, options, kind):
    module, s = build(name, **options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(name, kind, causal):
    module, s = build(name, causal=causal)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("name", NAMES)
def test_bit_projections_equal_the_oracle(name):
    module, s = build(name, projection="bit", qkv_bias=True, out_bias=True)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize("options", [{}, {"qkv_bias": True, "qk_norm": "width"}, {"causal": False, "window": 2}])
def test_mfa_is_multi_query_attention_with_a_factored_query(options):
    """Q_h S_q multiplied out into one q_proj of an mqa with head_dim = C: the same output."""
    module, _ = build("mfa", **options)
    state = module.state_dict()
    plain = {**SIZES, **options, "head_dim": SIZES["latent_dim"]}
    del plain["latent_dim"]
    mqa = hl.attention("mqa", **plain).double()
    state["q_proj.weight"] = state.pop("q_heads.weight") @ state.pop("q_down.weight")
    if "q_heads.bias" in state:
        state["q_proj.bias"] = state.pop("q_heads.bias")
    mqa.load_state_dict(state)
    x, side = draw(2, 7, 11), {"padding": torch.tensor([[True] * 7, [False] * 2 + [True] * 5])}
    assert_close(module(x, **side).detach(), mqa(x, **side).detach(), "folded", 1e-13)


def test_a_fresh_key_reuse_has_its_key_as_value():
    """alpha is 0 at the start: mfa_kr is then mqa with W_V = W_K and no rotation of the value; with alpha it moves."""
    fresh = hl.attention("mfa_kr", **SIZES, rope_theta=None).double()
    assert (fresh.alpha.weight == 0).all()
    state = fresh.state_dict()
    mfa = hl.attention("mfa", **SIZES, rope_theta=None).double()
    del state["alpha.weight"]
    mfa.load_state_dict({**state, "v_proj.weight": state["k_proj.weight"]})
    x = draw(2, 7, 11)
    assert_close(fresh(x).detach(), mfa(x).detach(), "values are keys", 1e-13)
    with torch.no_grad():
        fresh.alpha.weight += 0.1
    assert (fresh(x) - mfa(x)).abs().max() > 1e-4


def test_alpha_gets_the_first_gradient_and_then_n_does():
    module = hl.attention("mfa_kr", **SIZES)
    module(draw(2, 5, 11).float()).pow(2).sum().backward()
    assert module.alpha.weight.grad.abs().min() > 0 and not module.v_proj.weight.grad.any()
    assert module.no_decay() == ["alpha.weight"]
    assert module.half().alpha.weight.dtype == torch.float32


@pytest.mark.parametrize("rope", [None, {"rope_type": "dynamic", "factor": 2.0, "max_position_embeddings": 4}])
def test_the_key_is_remembered_unrotated(rope):
    """One slot of C numbers: the key before rotation, whatever the position; read, it gives the full pass."""
    module, _ = build("mfa_kr", rope_scaling=rope)
    x, cache = draw(2, 7, 11), hl.Cache()
    parts = [module(x[:, a:b], cache=cache).detach() for a, b in ((0, 3), (3, 4), (4, 7))]
    assert list(cache.held(0).slots) == ["k"] and cache.nbytes() == 2 * 7 * 6 * 8
    assert_rounds(cache.held(0).slots["k"][:, 0], module.k_proj(x), "key", terms=11)
    want = module(x).detach()
    assert_close(parts[-1][:, -1], want[:, -1], "the last token", 1e-12)
    if rope is None:
        assert_close(torch.cat(parts, 1), want, "cached", 1e-12)


@pytest.mark.parametrize(("name", "cache"), [("mfa", 2), ("mfa_kr", 1)])
def test_counts_are_the_closed_forms(name, cache):
    D, H, K, C, T = 96, 5, 16, 24, 13
    found = hl.cost(name, hidden_size=D, num_heads=H, head_dim=K, latent_dim=C, tokens=T)
    shared = H * C * C + H * C * D
    assert found.parameters == shared + (3 * D * C if name == "mfa" else 2 * D * C + C * C + C)
    assert found.cache_elements_per_token == cache * C
    projections = 3 * D * C + shared if name == "mfa" else 2 * D * C + shared + H * C * C
    assert found.flops_exact == 2 * (T * projections + T * (T + 1) // 2 * H * 2 * C)
    assert found.flops_full == 2 * (T * projections + T * T * H * 2 * C)
    assert hl.make_config(name, hidden_size=D, num_heads=H, head_dim=K).latent_dim == 2 * K


@pytest.mark.parametrize("name", NAMES)
def test_decoding_makes_no_value_of_the_past(name):
    """One token after S: what is done once per token remembered is the scores' 2 H 2 C, rotation aside."""
    from torch.utils.flop_counter import FlopCounterMode

    module, _ = build(name)
    counts = []
    for past in (20, 40):
        cache = hl.Cache()
        module(draw(1, past, 11), cache=cache)
        with FlopCounterMode(display=False) as counter:
            module(draw(1, 1, 11), cache=cache, update_cache=False)
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == 20 * 2 * 3 * 2 * 6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_large_logits_stay_finite(name, dtype):
    module = hl.attention(name, **SIZES, rope_theta=None, scale=1.0).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(0.3)
        module.q_heads.weight.fill_(4.0)
    x = (draw(2, 6, 11) * 4).to(dtype).requires_grad_()
    call = module._prepare(x)
    assert (call.q.float() @ call.handle.k.float().mT).abs().max() > 1e3
    out = module(x)
    out.float().sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("name", NAMES)
def test_maps_give_the_output(name):
    """out_h = sum over tokens of effective[h, 0] v."""
    module, s = build(name)
    x = draw(1, 6, 11)
    found = module.maps(x)
    values = torch.stack([oracle._token(dict(module.named_parameters()), token, s)[2] for token in x[0]])
    heads = found.effective[0, :, 0] @ values
    assert_close(module.o_proj(heads.transpose(0, 1).flatten(1)).detach(), module(x)[0].detach(), "maps", 1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"latent_dim": 0}, ["latent_dim", "0"]),
        ({"latent_dim": 5}, ["latent_dim 5", "rope_theta None"]),
        ({"rotary_dim": 8}, ["rotary_dim", "8", "6"]),
        ({"num_kv_heads": 3}, ["one key/value head", "3", "leave"]),
        ({"value_dim": 3}, ["value_dim", "3", "6", "leave"]),
        ({"base": "gqa"}, ["base", "gqa", "mfa"]),
        ({"latent": 5}, ["latent", "latent_dim"]),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_options_say_what_is_allowed(name, options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention(name, **{**SIZES, **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_models_generate_the_same_with_a_cache(name):
    sizes = {"hidden_size": 24, "num_heads": 4, "num_layers": 2, "intermediate_size": 20, "max_positions": 32}
    model = hl.build_model((name, {"latent_dim": 10}), vocab_size=29, **sizes).double().eval()
    randomise(model, spread=0.4)
    ids, how = torch.randint(3, 29, (2, 4), generator=torch.Generator().manual_seed(0)), {"max_new_tokens": 6}
    outs = [model.generate(ids, use_cache=use, do_sample=False, eos_token_id=None, **how) for use in (True, False)]
    assert torch.equal(*outs)
