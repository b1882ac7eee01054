"""2-simplicial attention against the loop oracle over all pairs: windows, masks, caches, reductions, costs."""

import pytest
import torch
from oracles import simplicial as oracle
from oracles.common import Row, base_heads, settings
from oracles.compare import assert_close, assert_matches, draw, randomise, sides, weights_of
from oracles.modules import training_peak

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops import simplicial

SIZES = {"hidden_size": 11, "num_heads": 3, "head_dim": 4, "first_window": 4, "second_window": 3}
GQA = {**SIZES, "num_heads": 6, "num_kv_heads": 2}
KINDS = ["plain", "left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
KINDS += ["padded_restart", "documents_win"]
OPTIONS = {
    "plain": {},
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window2": {"window": 2},
    "encoder_window2": {"window": 2, "causal": False},
    "one_second_key": {"second_window": 1},
    "two_second_keys": {"second_window": 2},
    "equal_windows": {"first_window": 3},
    "default_windows": {"first_window": 512, "second_window": 32},
    "no_first_window": {"first_window": None, "second_window": 2},
    "no_first_window_softcap": {"first_window": None, "softcap": 0.7},
    "encoder_wide": {"first_window": None, "second_window": 9, "causal": False},
    "norm_head": {"qk_norm": "head"},
    "norm_width": {"qk_norm": "width", "norm_eps": 0.2},
    "softcap": {"softcap": 0.7},
    "softcap_encoder": {"softcap": 0.7, "causal": False},
    "narrow_values": {"value_dim": 3},
    "wide_values": {"value_dim": 7},
    "biases": {"qkv_bias": True, "out_bias": True},
    "scale": {"scale": 0.3},
    "hard": {"score": "hard"},
    "identity": {"score": "identity"},
    "bit": {"projection": "bit"},
    "odd_width": {"head_dim": 5},
}


@pytest.fixture(params=[False, True], ids=["at_once", "pieces"])
def small(request, monkeypatch):
    """Also one offset a call, and query blocks of one row."""
    if request.param:
        monkeypatch.setattr(simplicial, "PASS_ELEMENTS", 1)
        monkeypatch.setattr(simplicial, "BLOCK_ELEMENTS", 1)


def build(base, options, spread=0.6):
    merged = {**base, **options}
    module = randomise(hl.attention("simplicial", **merged).double(), 0, spread).eval()
    return module, settings("simplicial", **{"rope_theta": None, "first_window": 512, "second_window": 32, **merged})


@pytest.mark.parametrize("base", [SIZES, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, base, small):
    module, s = build(base, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("softcap", [None, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, softcap, causal, small):
    module, s = build(GQA, {"causal": causal, "softcap": softcap})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("causal", [True, False])
def test_windows_that_the_fused_kernel_does(causal):
    """Rectangles beyond 16 tokens go through the fused kernel, forward and backward."""
    module, s = build({**SIZES, "num_heads": 1, "first_window": 18, "second_window": 2}, {"causal": causal}, 0.4)
    assert_matches(module, oracle, s, draw(1, 38, 11))


def test_a_pair_by_hand():
    """Two tokens, one head of width 1: the second query weighs (0,0), (0,1), (1,0), (1,1)."""
    module = hl.attention("simplicial", hidden_size=1, num_heads=1).double()
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(1.0)
    a, b = 0.3, -1.2
    x = torch.tensor([[[a], [b]]], dtype=torch.float64)
    pairs = [(j, k) for j in (a, b) for k in (a, b)]
    weights = torch.tensor([b * j * (k + 1) for j, k in pairs]).softmax(0)
    values = torch.tensor([j * (k + 1) for j, k in pairs])
    want = torch.stack([torch.tensor(a * (a + 1)), weights @ values]).double()
    assert_close(module(x)[0, :, 0].detach(), want, "by hand", 1e-6)


@pytest.mark.parametrize("kind", ["plain", "left", "documents"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("second", [1, 3])
def test_ones_are_exactly_mha(second, causal, kind):
    """k2 + 1/K = 1 and v2 + 1 = 1, whatever the second window."""
    sizes = {"hidden_size": 11, "num_heads": 3, "head_dim": 4, "qkv_bias": True, "causal": causal}
    module = randomise(hl.attention("simplicial", **sizes, second_window=second).double()).eval()
    with torch.no_grad():
        for layer, bias in ((module.k2_proj, 1 - 1 / 4), (module.v2_proj, 0.0)):
            layer.weight.zero_()
            layer.bias.fill_(bias)
    mha = hl.attention("mha", **sizes, rope_theta=None).double().eval()
    mha.load_state_dict({n: t for n, t in module.state_dict().items() if "2_" not in n})
    x = draw(2, 5, 11)
    assert_close(module(x, **sides(kind)).detach(), mha(x, **sides(kind)).detach(), "mha", 1e-12)


def test_pairs_that_are_masked_out(small):
    """A given rule per pair of tokens holds for both keys; a row without any returns 0."""
    module, _ = build(GQA, {"first_window": 5})
    x = draw(1, 5, 11)
    dead = torch.ones(1, 5, 5, dtype=torch.bool)
    dead[0, 3] = False
    assert (module(x, mask=hl.Dense(dead))[0, 3] == 0).all()
    documents = torch.tensor([[0, 0, 1, 1, 1]])
    same = documents[:, :, None] == documents[:, None, :]
    want = module(x, documents=documents).detach()
    assert_close(module(x, mask=hl.Dense(same)).detach(), want, "pairs as documents", 1e-12)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("parts", [[1] * 12, [5, 1, 1, 5], [2] * 6], ids=["ones", "mixed", "twos"])
def test_cached_equals_uncached_within_narrow_windows(parts, padded):
    module, _ = build(GQA, {})
    x, real = draw(2, 12, 11), torch.ones(2, 12, dtype=torch.bool)
    if padded:
        real[1, :2] = False
    want = module(x, padding=real).detach()
    cache, out, start = hl.Cache(), [], 0
    for size in parts:
        out.append(module(x[:, start : start + size], padding=real[:, start : start + size], cache=cache).detach())
        start += size
    assert_close(torch.cat(out, 1), want, "cached", 1e-12)
    assert cache.nbytes() == 8 * 2 * 12 * 4 * 2 * 4


@pytest.mark.parametrize("causal", [True, False])
def test_maps_are_the_two_marginals(causal):
    module, s = build(GQA, {"causal": causal})
    x = draw(1, 5, 11)
    found = module.maps(x)
    assert found.effective is None and found.patterns.shape == (1, 12, 5, 5)
    w, row = {n: t.detach() for n, t in weights_of(module).items()}, Row(5, s)
    q, k1, _ = zip(*(base_heads(w, y, s) for y in x[0]), strict=True)
    k2, _ = zip(*(oracle.second_heads(w, y, s) for y in x[0]), strict=True)
    want = torch.zeros(12, 5, 5, dtype=torch.float64)
    for i in range(5):
        pairs = oracle.pairs_of(row, s, i)
        for h in range(6):
            weights = oracle.weights_of_pairs(q[i][h], [k[h // 3] for k in k1], [k[h // 3] for k in k2], pairs, s)
            for weight, (j, k) in zip(weights, pairs, strict=True):
                want[h, i, j] += weight
                want[6 + h, i, k] += weight
    assert_close(found.patterns[0], want, "marginals", 1e-12)


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_dropout_keeps_the_mean(softcap):
    torch.manual_seed(0)
    module, _ = build(SIZES, {"dropout": 0.3, "softcap": softcap}, 0.4)
    x = draw(1, 4, 11)
    want = module(x).detach()
    module.train()
    with torch.no_grad():
        draws = module(x.expand(3000, 4, 11))
    spread = draws.std(0)
    assert (spread > 1e-4).all() and ((draws.mean(0) - want[0]).abs() < 5 * spread / 3000**0.5).all()


# causal: query i has min(i + 1, 4) first and min(i + 1, 3) second keys; encoder: 4 5 6 7 7 .. 6 5 4 and 3 4 5 5 .. 4 3
EXACT = {True: 1 + 4 + 9 + 13 * 12, False: 2 * (12 + 20 + 30) + 10 * 35}


@pytest.mark.parametrize("causal", [True, False])
def test_closed_form_costs(causal):
    D, H, G, K, V, T = 11, 6, 2, 4, 3, 16
    cost = hl.cost("simplicial", **GQA, value_dim=V, tokens=T, causal=causal)
    projections = D * H * (K + V) + 2 * D * G * (K + V)
    assert cost.parameters == projections
    assert cost.cache_elements_per_token == 2 * G * (K + V)
    assert cost.flops_exact == 2 * T * projections + 2 * EXACT[causal] * H * (K + V)
    assert cost.flops_full == 2 * T * projections + 2 * T * T * (3 if causal else 5) * H * (K + V)


def test_defaults():
    config = hl.attention("simplicial", hidden_size=24, num_heads=4).config
    assert (config.first_window, config.second_window, config.rope_theta, config.exact) == (512, 32, None, False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_a_thousand_stay_finite(dtype, small):
    module = hl.attention("simplicial", **GQA).to(dtype)
    with torch.no_grad():
        for p in (module.k_proj, module.q_proj, module.k2_proj):
            p.weight.mul_(8)
    x = (3 * draw(1, 9, 11)).to(dtype).requires_grad_()
    q, k1, k2 = (p(x).unflatten(-1, (-1, 4)).float() for p in (module.q_proj, module.k_proj, module.k2_proj))
    assert (q[:, :, :2] * k1 * k2).sum(-1).abs().max() / 2 > 1e3
    out = module(x)
    out.float().pow(2).mean().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rope_theta": 10000.0}, ["rope_theta", "10000.0", "None"]),
        ({"rotary_dim": 2}, ["rotary_dim"]),
        ({"first_window": 0}, ["first_window", "0"]),
        ({"second_window": 0}, ["second_window", "0"]),
        ({"first_window": 8, "second_window": 9}, ["second_window", "9", "8", "swap"]),
        ({"second_windw": 9}, ["second_windw", "second_window"]),
        ({"window": 0}, ["window", "0"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("simplicial", **{**GQA, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(("norm", "k2"), [("head", (4,)), ("width", (8,))])
def test_state_dict_names_and_shapes(norm, k2):
    module = hl.attention("simplicial", **GQA, value_dim=3, qkv_bias=True, qk_norm=norm)
    shapes = {n: tuple(t.shape) for n, t in module.state_dict().items()}
    wanted = {f"{n}_proj": (8, 11) for n in ("k", "k2")} | {f"{n}_proj": (6, 11) for n in ("v", "v2")}
    for name, shape in {**wanted, "q_proj": (24, 11), "o_proj": (11, 18)}.items():
        assert shapes.pop(f"{name}.weight") == shape
        assert name == "o_proj" or shapes.pop(f"{name}.bias") == shape[:1]
    assert shapes.pop("k2_norm.weight") == k2
    assert set(shapes) == {"q_norm.weight", "k_norm.weight"}


def test_memory_at_2048_tokens():
    """Forward and backward, H = 2: a tensor of T W1 W2 a head would be 64 MiB, one of T^2 W2 512 MiB, T^3 32 GiB."""
    sizes = {"hidden_size": 64, "num_heads": 2, "head_dim": 32, "first_window": 256}
    assert training_peak("simplicial", 2048, **sizes, second_window=32) < 160
    assert training_peak("simplicial", 2048, **sizes, second_window=8, softcap=5.0) < 80
