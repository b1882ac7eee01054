"""Multi-head Latent Attention against the loop oracle, its absorbed form, reductions, sizes and costs."""

import pytest
import torch
from oracles import mla as oracle
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.mechanism import Attention

MLA_SIZES = {"hidden_size": 11, "num_heads": 3, "head_dim": 5, "latent_dim": 7, "rotary_dim": 4, "plain_dim": 3}
KINDS = ["left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
OPTIONS = {
    "default": {},
    "defaults": {"latent_dim": None, "rotary_dim": None, "plain_dim": None},
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window2": {"window": 2},
    "encoder_window2": {"causal": False, "window": 2},
    "q_rank": {"q_rank": 5},
    "no_rotary": {"rope_theta": None},
    "theta": {"rope_theta": 30.0},
    "rotary2": {"rotary_dim": 2},
    "wide_rotary": {"rotary_dim": 8},
    "norm_eps": {"norm_eps": 0.3, "q_rank": 5},
    "softcap": {"softcap": 0.7},
    "value_dim": {"value_dim": 6},
    "biases": {"qkv_bias": True, "out_bias": True, "q_rank": 4},
    "biases_direct": {"qkv_bias": True},
    "scale": {"scale": 0.3},
    "identity": {"score": "identity"},
    "hard": {"score": "hard"},
    "bit": {"projection": "bit"},
}


def build(options, seed=0, **more):
    merged = {**MLA_SIZES, **options}
    module = randomise(hl.attention("mla", **merged, **more).double(), seed, 0.5).eval()
    return module, settings("mla", **merged)


@pytest.mark.parametrize("absorb", ["never", "always"])
@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, kind, absorb):
    if options.get("projection") == "bit" and absorb == "always":
        absorb = "auto"
    module, s = build(options, absorb=absorb)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("absorb", ["never", "always"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None), (False, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, causal, window, absorb):
    module, s = build({"causal": causal, "window": window, "q_rank": 5}, absorb=absorb)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def test_defaults():
    """K_n = V = K, K_r = K / 2 made even, C = 4 K but not above D, no latent of the queries."""
    config = hl.attention("mla", hidden_size=512, num_heads=8).config
    assert (config.plain_dim, config.value_dim, config.rotary_dim, config.latent_dim) == (64, 64, 32, 256)
    assert config.q_rank is None and config.num_kv_heads == 8 and config.query_dim == 96
    small = hl.attention("mla", hidden_size=20, num_heads=2).config
    assert (small.rotary_dim, small.latent_dim) == (6, 20)
    assert hl.attention("mla", hidden_size=20, num_heads=2, rope_theta=None).config.rotary_dim == 6


@pytest.mark.parametrize("chunks", [[1] * 7, [3, 1, 3], [6, 1]])
@pytest.mark.parametrize("options", [{}, {"q_rank": 5, "window": 3}, {"softcap": 0.8}, {"rope_theta": None}])
def test_absorbed_decoding_equals_the_plain_form(options, chunks):
    """Over a cache, one form against the other, outputs and the gradients of what the last call reads."""
    outs, gradients = {}, {}
    for absorb in ("never", "always"):
        module, _ = build(options, absorb=absorb)
        x, cache, parts = draw(2, 7, 11).requires_grad_(), hl.Cache(), []
        for part in x.split(chunks, 1):
            parts.append(module(part, cache=cache))
        outs[absorb] = torch.cat(parts, 1)
        gradients[absorb] = torch.autograd.grad(outs[absorb].pow(2).sum(), [x, *module.parameters()])
    assert_close(outs["always"].detach(), outs["never"].detach(), "absorbed", 1e-12)
    for a, b in zip(gradients["always"], gradients["never"], strict=True):
        assert_close(a, b, "gradient", 1e-10)


def absorbed(monkeypatch, module, past, tokens):
    """Whether `tokens` more over a cache of `past` ran absorbed, by the width of the queries scored."""
    widths, plain = [], Attention.core

    def core(self, q, *rest):
        widths.append(q.shape[-1])
        return plain(self, q, *rest)

    cache = hl.Cache()
    with torch.no_grad(), monkeypatch.context() as patch:
        patch.setattr(Attention, "core", core)
        for size in (past, tokens):
            if size:
                module(torch.randn(1, size, module.config.hidden_size), cache=cache)
    return widths[-1] == module.config.rotary_dim + module.config.latent_dim


def test_absorbed_where_it_is_cheaper(monkeypatch):
    """Few queries over a long past absorb; a long call expands its keys once. The bound is the multiply-adds'."""
    module = hl.attention("mla", hidden_size=64, num_heads=4, latent_dim=48, rotary_dim=8).eval()
    assert absorbed(monkeypatch, module, 40, 1) and absorbed(monkeypatch, module, 0, 1) is False
    assert not absorbed(monkeypatch, module, 0, 40) and not absorbed(monkeypatch, module, 8, 32)
    up = 48 * 32
    for T in (9, 25, 31, 40):
        S = 40 + T
        cheaper = T * up + T * S * (8 + 96) < S * up + T * S * (8 + 16 + 16)
        assert absorbed(monkeypatch, module, 40, T) is cheaper
    assert absorbed(monkeypatch, hl.attention("mla", hidden_size=64, num_heads=4, absorb="always").eval(), 0, 40)
    assert not absorbed(monkeypatch, hl.attention("mla", hidden_size=64, num_heads=4, absorb="never").eval(), 40, 1)
    assert not absorbed(monkeypatch, hl.attention("mla", hidden_size=64, num_heads=4, projection="bit").eval(), 40, 1)


def test_without_a_bottleneck_it_is_mha():
    """C = D and W_DKV's c the identity: kv_up reads RMSNorm(x). With K_r turned features of a zero k_r, and x of unit
    mean square, it is mha without rotary whose k and v projections are kv_up's rows, up to the scale."""
    D, H, K = 8, 2, 4
    module = randomise(hl.attention("mla", hidden_size=D, num_heads=H, latent_dim=D, norm_eps=1e-12).double())
    mha = hl.attention("mha", hidden_size=D, num_heads=H, rope_theta=None, scale=1 / 6**0.5).double()
    with torch.no_grad():
        module.kv_down.weight.zero_()
        module.kv_down.weight[:D] = torch.eye(D)
        module.kv_norm.weight.fill_(1)
        up = module.kv_up.weight.view(H, 2 * K, D)
        mha.k_proj.weight.copy_(up[:, :K].reshape(H * K, D))
        mha.v_proj.weight.copy_(up[:, K:].reshape(H * K, D))
        mha.q_proj.weight.copy_(module.q_proj.weight.view(H, 2 + K, D)[:, 2:].reshape(H * K, D))
        mha.o_proj.weight.copy_(module.o_proj.weight)
    x = draw(2, 5, D)
    x = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    assert_close(module(x).detach(), mha(x).detach(), "mha", 1e-10)


def test_only_the_rotary_features_turn():
    """Moving all positions alike changes nothing; moving one token does, unless there is no rotary part to speak of."""
    module, _ = build({})
    x = draw(1, 5, 11)
    places = torch.tensor([[0, 1, 2, 3, 9]])
    assert_close(module(x, positions=torch.arange(5) + 11).detach(), module(x).detach(), "shifted", 1e-10)
    assert (module(x, positions=places) - module(x)).abs().max() > 1e-4
    with torch.no_grad():
        module.kv_down.weight[7:].zero_()
    assert_close(module(x, positions=places).detach(), module(x).detach(), "no shared key", 1e-12)


@pytest.mark.parametrize("q_rank", [None, 24])
def test_costs_equal_the_closed_form(q_rank):
    D, H, K, C, Kr, T = 64, 4, 16, 40, 8, 32
    cost = hl.cost("mla", hidden_size=D, num_heads=H, latent_dim=C, q_rank=q_rank, tokens=T)
    q = D * H * (K + Kr) if q_rank is None else D * q_rank + q_rank * H * (K + Kr)
    weights = q + D * (C + Kr) + C * H * 2 * K + H * K * D
    assert cost.parameters == weights + C + (q_rank or 0)
    assert cost.cache_elements_per_token == C + Kr
    assert cost.flops_full == 2 * (weights * T + T * T * H * (K + Kr + K))
    assert cost.flops_exact == 2 * (weights * T + T * (T + 1) // 2 * H * (K + Kr + K))
    parts = {part.step: part.flops_exact for part in cost.parts}
    assert parts["score"] == 2 * T * (T + 1) // 2 * H * (K + Kr + K) and parts["expand"] == 2 * T * C * H * 2 * K


def test_state_dict_names_and_shapes():
    shapes = {n: tuple(t.shape) for n, t in build({"q_rank": 6, "value_dim": 2})[0].state_dict().items()}
    assert shapes == {
        "q_down.weight": (6, 11),
        "q_norm.weight": (6,),
        "q_up.weight": (3 * 7, 6),
        "kv_down.weight": (7 + 4, 11),
        "kv_norm.weight": (7,),
        "kv_up.weight": (3 * (3 + 2), 7),
        "o_proj.weight": (11, 6),
    }
    direct = hl.attention("mla", **MLA_SIZES).state_dict()
    assert direct["q_proj.weight"].shape == (21, 11) and "q_down.weight" not in direct


@pytest.mark.parametrize("absorb", ["never", "always"])
def test_maps_are_the_patterns_whatever_the_form(absorb):
    module, s = build({}, absorb=absorb)
    x = draw(1, 5, 11)
    maps = module.maps(x)
    want = oracle.patterns(dict(module.named_parameters()), x[0], s)
    assert_close(maps.patterns[0], want, "patterns", 1e-10)
    v = oracle_values(module, x, s)  # (S, H, V)
    out = torch.einsum("bhgts,sgv->bthv", maps.effective, v).flatten(2)
    assert_close(out @ module.o_proj.weight.T.detach(), module(x).detach(), "effective map", 1e-10)


def oracle_values(module, x, s):
    return torch.stack([torch.stack(oracle.heads(dict(module.named_parameters()), t, s)[2]) for t in x[0]]).detach()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("absorb", ["never", "always"])
def test_large_logits_stay_finite(dtype, absorb):
    """Logits of magnitude 1e3, with and without a cache."""
    module = hl.attention("mla", hidden_size=32, num_heads=4, absorb=absorb).to(dtype).eval()
    x = torch.randn(2, 7, 32, dtype=dtype)
    ready = module._prepare(x)
    q, k = ready.q, module.expand(ready.handle)[0]
    peak = (q.float() @ k.float().transpose(-1, -2)).abs().max() * module._scale(q)
    with torch.no_grad():
        module.q_proj.weight.mul_(1e3 / peak)
    x.requires_grad_()
    cache = hl.Cache()
    out = torch.cat([module(x), module(x[:, :6], cache=cache), module(x[:, 6:], cache=cache)], 1)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_heads": 2}, ["mla", "4", "2"]),
        ({"latent_dim": 0}, ["latent_dim", "0"]),
        ({"latent_dim": 17}, ["latent_dim", "17", "16"]),
        ({"q_rank": 0}, ["q_rank", "0"]),
        ({"q_rank": 20}, ["q_rank", "20", "16"]),
        ({"plain_dim": -1}, ["plain_dim", "-1"]),
        ({"rotary_dim": 3}, ["rotary_dim", "3", "even"]),
        ({"qk_norm": "head"}, ["qk_norm", "mla", "gqa"]),
        ({"absorb": "alway"}, ["alway", "always"]),
        ({"absorb": "always", "projection": "bit"}, ["absorb", "bit", "auto"]),
        ({"k_rank": 2}, ["unknown", "k_rank", "mla"]),
        ({"kv_only": True}, ["unknown", "kv_only", "mla"]),
        ({"base": "gqa"}, ["base", "mla", "gqa"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("mla", **{"hidden_size": 16, "num_heads": 4, **options})
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("option", ["latent_dim", "plain_dim", "q_rank"])
def test_other_bases_refuse_its_sizes(option):
    words = {"unknown option '{option}' of {name}": ("mha", "gqa"), "{option} belongs to base mla": ("iha", "sas")}
    for text, name in ((text, name) for text, names in words.items() for name in names):
        with pytest.raises(HeadloomError, match=text.format(option=option, name=name)):
            hl.attention(name, hidden_size=16, num_heads=4, **{option: 4})
