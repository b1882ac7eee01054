"""What an attention computes, by small numbers that a reader can check by hand: masks, caches, costs, wrong calls."""

import itertools

import pytest
import torch
from oracles.common import settings
from oracles.compare import assert_close, draw, randomise

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops import fused, scores

SIZES = {"hidden_size": 11, "num_heads": 3, "head_dim": 6}
EVERY = {
    "mha": ("mha", {}),
    "gqa": ("gqa", {"num_heads": 4, "num_kv_heads": 2}),
    "virtual": ("iha", {"pseudo_heads": 2}),
    "token": ("iha", {"pseudo_heads": 3, "order": "token", "phase": "token", "cache": "expanded"}),
    "paired": ("iha", {"pseudo_heads": 2, "interaction": "paired", "phase": "token", "collapse": "mean"}),
    "sas": ("sas", {"simulated_heads": 6}),
    "sas_base": ("sas", {"simulated_heads": 6, "cache": "base", "order": "feature_first"}),
}
every = pytest.mark.parametrize("which", EVERY.values(), ids=EVERY)


def build(which, **options):
    name, own = which
    return randomise(hl.attention(name, **{**SIZES, **own, **options}).double(), 0, 0.5).eval()


def counting(**options):
    """mha whose output is the mean of the visible tokens' one-hot inputs: row t shows exactly who is seen."""
    module = hl.attention("mha", hidden_size=8, num_heads=1, **options).double()
    with torch.no_grad():
        module.q_proj.weight.zero_()
        module.v_proj.weight.copy_(torch.eye(8))
        module.o_proj.weight.copy_(torch.eye(8))
    return module, torch.eye(8, dtype=torch.float64)[None]


def counts(out):
    return (out[0] > 0).sum(-1).tolist()


def test_boolean_mask_with_a_dead_row():
    module = randomise(hl.attention("mha", hidden_size=4, num_heads=1, causal=False).double())
    x = draw(1, 2, 4).requires_grad_()
    out = module(x, mask=hl.Dense(torch.tensor([[[True, False], [False, False]]])))
    assert (out[0, 1] == 0).all()
    assert_close(out[0, 0].detach(), module.o_proj(module.v_proj(x[0, 0])).detach(), "live row", 1e-14)
    grads = torch.autograd.grad(out.sum(), [x, *module.parameters()])
    assert all(torch.isfinite(g).all() for g in grads) and (grads[0][0, 1] == 0).all()


@every
def test_two_layers_with_left_padding(which):
    """[[PAD,PAD,a,b],[a,b,c,d]] through two layers: no NaN, real rows as unpadded."""
    first, second = build(which), randomise(build(which), 1, 0.5)
    x = draw(2, 4, 11)
    real = torch.tensor([[False, False, True, True], [True] * 4])
    x[0, :2] = float("inf")
    safe = x.masked_fill(~real[..., None], 1e3)
    out = second(first(safe, padding=real), padding=real)
    assert torch.isfinite(out).all()
    assert_close(out[0, 2:].detach(), second(first(x[:1, 2:]))[0].detach(), "padded row", 1e-10)
    assert_close(out[1].detach(), second(first(x[1:]))[0].detach(), "full row", 1e-10)


def test_new_queries_see_the_cache():
    module, x = counting()
    cache = hl.Cache()
    module(x[:, :4], cache=cache)
    one = module(x[:, 4:5], cache=cache, update_cache=False)
    assert counts(one) == [5]
    torch.testing.assert_close(one[0, 0], torch.tensor([0.2] * 5 + [0.0] * 3, dtype=torch.float64))
    cache = hl.Cache()
    module(x[:, :3], cache=cache)
    assert counts(module(x[:, 3:5], cache=cache)) == [4, 5]


def test_causal_equals_an_explicit_triangle():
    module, encoder = build(EVERY["mha"]), build(EVERY["mha"], causal=False)
    encoder.load_state_dict(module.state_dict())
    x = draw(2, 7, 11)
    triangle = torch.ones(1, 7, 7, dtype=torch.bool).tril()
    assert_close(encoder(x, mask=hl.Dense(triangle)).detach(), module(x).detach(), "triangle", 1e-12)
    assert_close(encoder(x, mask=hl.Causal()).detach(), module(x).detach(), "Causal", 1e-12)
    assert (encoder(x) - module(x)).abs().max() > 1e-3


@pytest.mark.parametrize("softcap", [None, 5.0], ids=["fused", "blocks"])
@pytest.mark.parametrize("how", ["config", "mask", "dense"])
def test_window_of_four(how, softcap):
    """S=8, W=4: rows see 1,2,3,4,4,4,4,4 keys, on every path; without causality 4,5,6,7,7,6,5,4."""
    for causal, want in ((True, [1, 2, 3, 4, 4, 4, 4, 4]), (False, [4, 5, 6, 7, 7, 6, 5, 4])):
        module, x = counting(causal=causal, softcap=softcap, window=4 if how == "config" else None)
        near = (torch.arange(8)[:, None] - torch.arange(8)).abs() < 4
        mask = {"config": None, "mask": hl.Window(4), "dense": hl.Dense(near[None])}[how]
        with scores.paths() as ran:
            out = module(x, mask=mask)
        assert counts(out) == want
        assert dict(ran) == {"blocks" if softcap else "masked" if how == "dense" else "fused": 1}


@every
def test_padding_by_any_name(which):
    """Mask [F,T,T] with causal: padding=, Padding, Documents with -1 and a pair mask give the same, dead row 0."""
    module = build(which)
    x = draw(2, 3, 11)
    real = torch.tensor([[False, True, True]] * 2)
    pairs = (real[:, None] & real[:, :, None]).tril()
    want = module(x, padding=real).detach()
    assert (want[:, 0] == 0).all() and (want[:, 1:] != 0).all()
    for mask in (hl.Padding(real), hl.Dense(pairs), hl.Dense(pairs[:, None]), hl.Documents(real.long() - 1)):
        assert_close(module(x, mask=mask).detach(), want, type(mask).__name__, 1e-12)
    assert_close(module(x, padding=real.long()).detach(), want, "0/1 padding", 1e-12)
    soft = build(which, softcap=1e8)
    soft.load_state_dict(module.state_dict())
    assert_close(soft(x, padding=real).detach(), want, "materialised path", 1e-10)


@pytest.mark.parametrize(
    ("name", "options", "elements"),
    [
        ("mha", {}, 2048),
        ("gqa", {"num_kv_heads": 4}, 512),
        ("iha", {"pseudo_heads": 2}, 2048),
        ("iha", {"pseudo_heads": 2, "num_kv_heads": 4}, 512),
        ("iha", {"pseudo_heads": 2, "cache": "expanded"}, 4096),
        ("sas", {"simulated_heads": 32, "simulated_width": 80}, 32 * (80 + 64)),
        ("sas", {"simulated_heads": 32, "simulated_width": 80, "cache": "base"}, 2048),
    ],
)
def test_cache_elements(name, options, elements):
    """H=G=16, K=64: base 2048 a token and layer, expanded P=2 4096; what the cache holds is what is said."""
    sizes = {"hidden_size": 16, "num_heads": 16, "head_dim": 64, **options}
    module = hl.attention(name, **sizes)
    assert sum(heads * width for heads, width in module.cache_slots().values()) == elements
    cache = hl.Cache()
    module(torch.randn(1, 3, 16), cache=cache)
    assert cache.nbytes() == 3 * 4 * elements
    assert hl.cost(name, **sizes).cache_elements_per_token == elements


@pytest.mark.parametrize("order", ["virtual", "token"])
@pytest.mark.parametrize("phase", ["virtual", "token"])
def test_both_cache_forms_agree(order, phase):
    a, b = (
        build(("iha", {"pseudo_heads": 2, "order": order, "phase": phase, "cache": c})) for c in ("base", "expanded")
    )
    x = draw(2, 7, 11)
    for module in (a, b):
        cache = hl.Cache()
        found = torch.cat([module(x[:, i : i + 1], cache=cache) for i in range(7)], 1)
        assert_close(found.detach(), a(x).detach(), "cached", 1e-10)


@pytest.mark.parametrize("init", ["identity", "carrier"])
def test_built_on_meta_mixes_are_still_the_identity(init):
    with torch.device("meta"):
        module = hl.attention("iha", **SIZES, pseudo_heads=2, init=init, order="token", phase="token")
    module.to_empty(device="cpu")
    module.reset_parameters()
    w = {n: p.detach() for n, p in module.named_parameters()}
    identity = torch.eye(3)[:, None].expand(3, 2, 3)
    assert torch.equal(w["k_mix.weight"], identity)
    assert torch.equal(
        w["q_mix.weight"] if init == "identity" else w["q_mix.weight"][:, 1:],
        identity[:, : 2 if init == "identity" else 1],
    )
    assert (w["v_mix.weight"].sum(1) - 2 * torch.eye(3)).abs().max() < 1e-6
    assert (w["out_mix.weight"].sum(-1) - torch.eye(3)).abs().max() < 1e-6
    assert set(module.no_decay()) == {f"{m}_mix.weight" for m in ("q", "k", "v", "out")}


@every
def test_teacher_forced(which):
    module = build(which)
    x = draw(2, 9, 11)
    for chunks in ([1] * 9, [4, 1, 3, 1]):
        for offset in (0, 6):
            positions, cache, start, out = torch.arange(9) + offset, hl.Cache(), 0, []
            for size in chunks:
                part = slice(start, start + size)
                out.append(module(x[:, part], positions=positions[part], cache=cache))
                start += size
            assert_close(torch.cat(out, 1).detach(), module(x, positions=positions).detach(), "cached", 1e-10)


@every
def test_beams(which):
    """Reading a cache without writing it lets two continuations of one prompt share it."""
    module = build(which)
    prompt, beams = draw(1, 4, 11), [draw(1, 2, 11, seed=s) for s in (7, 8)]
    cache = hl.Cache()
    module(prompt, cache=cache)
    for beam in beams:
        found = module(beam, cache=cache, update_cache=False)
        assert_close(found.detach(), module(torch.cat([prompt, beam], 1))[:, 4:].detach(), "beam", 1e-10)
    assert cache.length(0) == 4


@every
def test_restarting_positions(which):
    """[0,1,2,0,1]: token 0 does not move tokens 3 and 4; given documents win over restarts."""
    module = build(which)
    x = draw(1, 5, 11)
    changed = x.clone()
    changed[:, 0] += 1
    places = torch.tensor([0, 1, 2, 0, 1])
    a, b = module(x, positions=places), module(changed, positions=places)
    assert torch.equal(a[:, 3:], b[:, 3:]) and (a[:, :3] - b[:, :3]).abs().amax(-1).min() > 1e-6
    one = torch.zeros(1, 5, dtype=torch.long)
    a, b = (module(y, positions=places, documents=one) for y in (x, changed))
    assert (a[:, 3:] - b[:, 3:]).abs().amax(-1).min() > 1e-6


def test_token_two_sees_three_keys():
    module, x = counting()
    assert counts(module(x[:, :5], positions=torch.tensor([0, 1, 2, 0, 1]))) == [1, 2, 3, 1, 2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mha", "iha", "sas"])
def test_far_positions_in_half_precision(name, dtype):
    """Shifting all positions by 2000 changes a half-precision output by rounding only: tables are float32."""
    torch.manual_seed(1)
    module = hl.attention(name, hidden_size=32, num_heads=2, head_dim=32, rope_theta=10000.0).to(dtype)
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.weight.mul_(8)
    x = torch.randn(1, 33, 32).to(dtype)
    exact = hl.attention(name, hidden_size=32, num_heads=2, head_dim=32).double()
    exact.load_state_dict(module.state_dict())
    want = exact(x.double())
    near, far = (module(x, positions=torch.arange(33) + shift).double() - want for shift in (0, 2000))
    assert far.abs().max() < 2 * near.abs().max()
    assert (exact(x.double(), positions=torch.arange(33) + 2000) - want).abs().max() < 1e-9


@every
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kind", ["plain", "padded"])
def test_every_kernel_gives_the_same(which, window, kind, monkeypatch):
    """Fused kernels for every rectangle, or plain products for every rectangle: value and gradient."""
    module = build(which, window=window)
    x = draw(2, 13, 11)
    real = torch.ones(2, 13, dtype=torch.bool)
    real[0, :4] = False
    results = []
    for small in (0, 10**6):
        monkeypatch.setattr(fused, "SMALL", small)
        start = x.clone().requires_grad_()
        out = module(start, padding=real if kind == "padded" else None)
        results.append([out, *torch.autograd.grad(out.pow(2).sum(), [start, *module.parameters()])])
    for a, b in zip(*results, strict=True):
        assert_close(a.detach(), b.detach(), "other kernel", 1e-10)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"padding": torch.ones(2, 4, dtype=torch.bool)}, ["padding", "(2, 4)"]),
        ({"documents": torch.zeros(3, 5, dtype=torch.long)}, ["documents", "(3, 5)"]),
        ({"positions": torch.arange(4)}, ["positions", "4"]),
        ({"mask": hl.Dense(torch.ones(1, 4, 4, dtype=torch.bool))}, ["mask", "4", "5"]),
    ],
)
def test_side_inputs_of_a_wrong_shape_are_refused(call, words):
    with pytest.raises(HeadloomError) as caught:
        build(EVERY["mha"])(draw(2, 5, 11), **call)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("shape", [(5, 11), (2, 5, 10), (2, 5, 3, 11)])
def test_inputs_of_a_wrong_shape_are_refused(shape):
    with pytest.raises(HeadloomError) as caught:
        build(EVERY["mha"])(torch.zeros(shape, dtype=torch.float64))
    assert "11" in str(caught.value)


@pytest.mark.parametrize("width", [0, -1, 2.5, True, "4"])
def test_windows_below_one_are_refused(width):
    with pytest.raises(HeadloomError, match="window"):
        hl.Window(width)


CLOSED = list(itertools.product([(4, 4), (4, 2), (4, 1)], [False, True]))


@pytest.mark.parametrize(("heads", "bias"), CLOSED)
def test_parameters_and_caches_are_the_closed_forms(heads, bias):
    """Counts by hand: projections, 4 H^2 P-like mixes, convolutions and linears; caches 2 G K, 2 P H K, E (J + K)."""
    H, G = heads
    D, K, V, P, E, J, kernel = 11, 6, 5, 3, 8, 10, 3
    sizes = {"hidden_size": D, "num_heads": H, "head_dim": K, "value_dim": V, "qkv_bias": bias, "out_bias": bias}
    base = (H + G) * K * (D + bias) + G * V * (D + bias) + D * (H * V + bias)
    name = {4: "mha", 2: "gqa", 1: "mqa"}[G]
    found = hl.cost(name, **sizes, num_kv_heads=G)
    assert (found.parameters, found.cache_elements_per_token) == (base, G * (K + V))
    sizes["num_kv_heads"] = G
    for collapse, extra in (("full", H * H * P), ("head", H * P), ("mean", 0)):
        for cache, elements in (("base", G * (K + V)), ("expanded", P * H * (K + V))):
            found = hl.cost("iha", **sizes, pseudo_heads=P, collapse=collapse, cache=cache, init="normal")
            assert found.parameters == base + H * P * (H + 2 * G) + extra
            assert found.cache_elements_per_token == elements
    simulated = sum(E * c * kernel + E + E * E * kernel + E for c in (H, G, G)) + 2 * (K * J + J + J * J + J)
    for aggregate, extra in (
        ("mean", 0),
        ("nonlinear", E * E + E + E * H + H),
        ("full", D * (E - H) * V),
    ):
        for cache, elements in (("base", G * (K + V)), ("expanded", E * (J + V))):
            options = {"simulated_heads": E, "simulated_width": J, "kernel_size": kernel}
            found = hl.cost("sas", **sizes, **options, aggregate=aggregate, cache=cache)
            assert found.parameters == base + simulated + extra
            assert found.cache_elements_per_token == elements


@pytest.mark.parametrize(("order", "count"), [("head_first", 663_552), ("feature_first", 350_208)])
def test_published_simulation_costs(order, count):
    """E=36 from H=12, K=64, J=96, kernel 1: multiply-adds per token of one tensor's simulation."""
    found = hl.cost(
        "sas", hidden_size=768, num_heads=12, simulated_heads=36, simulated_width=96, kernel_size=1, order=order
    )
    assert found.simulation_multiply_adds == count


def score_flops(cost):
    """(full, exact) multiply-adds of the scores' part."""
    parts = [p for p in cost.parts if p.step == "score"]
    assert len(parts) == 1, [p.step for p in cost.parts]
    return parts[0].flops_full // 2, parts[0].flops_exact // 2


@pytest.mark.parametrize(
    ("T", "window", "causal"), [(16, None, True), (16, 4, True), (16, None, False), (16, 4, False)]
)
def test_score_flops_are_the_closed_forms(T, window, causal):
    """Full: all pairs; exact: visible pairs counted one by one; (K + V) multiply-adds a pair and head."""
    from oracles.common import visible

    sizes = {"hidden_size": 11, "num_heads": 4, "head_dim": 6, "value_dim": 5, "window": window, "causal": causal}
    tokens = list(itertools.product(range(T), range(T)))
    seen = [(t, n) for t, n in tokens if visible(t, n, 0, 0, True, True, causal, window)]
    own = sum(t == n for t, n in seen)
    assert score_flops(hl.cost("mha", tokens=T, **sizes)) == (4 * 11 * T * T, 4 * 11 * len(seen))
    P = 3
    for order in ("virtual", "token"):
        found = hl.cost("iha", tokens=T, **sizes, pseudo_heads=P, order=order)
        hidden = own * (P * (P - 1) // 2) if order == "virtual" and causal else 0
        assert score_flops(found) == (4 * 11 * T * T * P * P, 4 * 11 * (len(seen) * P * P - hidden))
    paired = hl.cost(
        "iha", tokens=T, **sizes, pseudo_heads=P, interaction="paired", phase="token", collapse="mean", init="normal"
    )
    assert score_flops(paired) == (4 * P * 11 * T * T, 4 * P * 11 * len(seen))
    sas = hl.cost("sas", tokens=T, **sizes, simulated_heads=8, simulated_width=10)
    assert score_flops(sas) == (8 * 15 * T * T, 8 * 15 * len(seen))


def test_mha_flops_are_the_closed_forms():
    """Projections 2 T D (H + 2 G) K + 2 T H K D, scores 2 T^2 H 2 K. head_dim is free, 47 x 64 at D = 1024."""
    cost = hl.cost("mha", tokens=32, hidden_size=1024, num_heads=47, head_dim=64)
    width = 47 * 64
    assert cost.flops_full == 2 * 32 * 1024 * width * 4 + 2 * 32 * 32 * width * 2
    assert cost.flops_exact == 2 * 32 * 1024 * width * 4 + 2 * (32 * 33 // 2) * width * 2
    assert sum(part.flops_full for part in cost.parts) == cost.flops_full
    assert sum(part.flops_exact for part in cost.parts) == cost.flops_exact
    grouped = hl.cost("gqa", tokens=32, hidden_size=64, num_heads=8, num_kv_heads=2)
    assert score_flops(grouped) == score_flops(hl.cost("mha", tokens=32, hidden_size=64, num_heads=8))


def test_settings_and_configs_agree_on_defaults():
    """The oracles' defaults, written down apart from the package, are the package's."""
    for name, sizes in itertools.product(("mha", "gqa", "mqa", "iha", "sas"), ({"num_heads": 8}, {"num_heads": 4})):
        config, s = hl.make_config(name, hidden_size=48, **sizes), settings(name, hidden_size=48, **sizes)
        for key, value in vars(s).items():
            # kv_only has a value on base tpa alone
            if hasattr(config, key) and key not in ("rotary_dim", "base", "kv_only"):
                assert getattr(config, key) == value, (name, key)
