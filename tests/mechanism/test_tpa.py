"""Tensor Product Attention against the loop oracle, its rank-space decoding, reductions, inits, sizes and costs."""

import pytest
import torch
from oracles import tpa as oracle
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops import factors
from headloom.ops.factors import mean_product
from headloom.ops.scores import paths

TPA_SIZES = {"hidden_size": 11, "num_heads": 4, "head_dim": 6, "q_rank": 3, "k_rank": 2, "v_rank": 4}
KINDS = ["left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
OPTIONS = {
    "default": {},
    "defaults": {"q_rank": None, "k_rank": None, "v_rank": None},
    "rank1": {"q_rank": 1, "k_rank": 1, "v_rank": 1},
    "kv_only": {"q_rank": None, "kv_only": True},
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window2": {"window": 2},
    "encoder_window2": {"causal": False, "window": 2},
    "no_rotary": {"rope_theta": None},
    "theta": {"rope_theta": 30.0},
    "rotary2": {"rotary_dim": 2},
    "softcap": {"softcap": 0.7},
    "value_dim": {"value_dim": 5},
    "biases": {"qkv_bias": True, "out_bias": True},
    "scale": {"scale": 0.3},
    "identity": {"score": "identity"},
    "hard": {"score": "hard"},
    "bit": {"projection": "bit"},
}


def build(options, seed=0):
    merged = {**TPA_SIZES, **options}
    module = randomise(hl.attention("tpa", **merged).double(), seed, 0.5).eval()
    return module, settings("tpa", **merged)


@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, kind):
    module, s = build(options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None), (False, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, causal, window):
    module, s = build({"causal": causal, "window": window})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


class Cached(torch.nn.Module):
    """A module that sees `chunks` of its input one after the other over a cache: the rank-space path."""

    def __init__(self, module, chunks):
        super().__init__()
        self.__dict__["module"], self.chunks = module, chunks

    def named_parameters(self, *args, **kwargs):
        return self.module.named_parameters(*args, **kwargs)

    def forward(self, x, **side):
        cache, out, start = hl.Cache(), [], 0
        for size in self.chunks:
            part = slice(start, start + size)
            out.append(self.module(x[:, part], cache=cache, **{k: v[..., part] for k, v in side.items()}))
            start += size
        return torch.cat(out, 1)


@pytest.mark.parametrize("elements", [1 << 24, 40], ids=["whole", "blocks"])
@pytest.mark.parametrize("kind", ["plain", "holes", "documents"])
@pytest.mark.parametrize("options", [o for n, o in OPTIONS.items() if o.get("causal", True)])
def test_rank_space_equals_the_oracle(monkeypatch, options, kind, elements):
    """Outputs and every gradient through a cache, at once and in blocks of one query."""
    monkeypatch.setattr(factors, "_BLOCK_ELEMENTS", elements)
    module, s = build(options)
    with paths() as ran:
        assert_matches(Cached(module, [2, 1, 2]), oracle, s, draw(2, 5, 11), **sides(kind))
    assert ran["factors"] == 2


@pytest.mark.parametrize("kind", ["plain", "left", "right", "holes", "documents"])
@pytest.mark.parametrize("options", [{}, {"window": 3}, {"window": 1}, {"causal": False}, {"value_dim": 5}], ids=str)
def test_blocks_of_keys_equal_the_whole(monkeypatch, options, kind):
    """Many queries over a past, keys expanded four tokens at a time and queries met four at a time."""
    monkeypatch.setattr(factors, "_BLOCK_TOKENS", 4)
    monkeypatch.setattr(factors, "_FEW", 1)
    module, _ = build(options)
    x, real = draw(2, 17, 11), torch.ones(2, 17, dtype=torch.bool)
    real[0, {"left": slice(0, 7), "right": slice(13, None), "holes": slice(3, 9)}.get(kind, slice(0, 0))] = False
    real[1] = kind != "holes"
    side = {} if kind == "plain" else {"documents": torch.arange(17).expand(2, 17) // 6, "padding": real}
    if kind != "documents":
        side.pop("documents", None)
    with torch.no_grad(), paths() as ran:
        cache = hl.Cache()
        if options.get("causal", True):
            want = module(x, **side)
            found = Cached(module, [6, 1, 10])(x, **side)
        else:  # an encoder's last tokens, over a cache of the first
            module(x[:, :6], cache=cache, **{k: v[:, :6] for k, v in side.items()})
            found = module(x[:, 6:], cache=cache, **{k: v[:, 6:] for k, v in side.items()})
            want = module(x, **side)[:, 6:]
    assert_close(found, want, "blocks", 1e-12)
    assert ran["factor blocks"] == 1


@pytest.mark.parametrize("learns", [False, True])
def test_the_past_is_never_expanded(monkeypatch, learns):
    """Over a cache no product of factors is longer than the call's own tokens, or a block where many meet the past."""
    from headloom.contract.bases import factor
    from headloom.mechanism import tpa

    made, kept = [], mean_product

    def watched(a, b):
        made.append(a.shape[2])
        return kept(a, b)

    for module in (factor, tpa, factors):
        monkeypatch.setattr(module, "mean_product", watched)
    monkeypatch.setattr(factors, "_BLOCK_TOKENS", 4)
    attn, cache = build({})[0], hl.Cache()
    with torch.set_grad_enabled(learns):
        for size in (9, 1, 3, 1, 9):
            attn(draw(1, size, 11), cache=cache)
    assert made[:6] == [9, 9, 9, 1, 3, 1]  # q, k and v of the first call, then q alone
    assert made[6] == 9 and (made[7:] == [] if learns else made[7:] and max(made[7:]) == 4)
    assert {n: tuple(t.shape) for n, t in cache.held(0).slots.items()} == {
        "k_a": (1, 2, 23, 4), "k_b": (1, 2, 23, 6), "v_a": (1, 4, 23, 4), "v_b": (1, 4, 23, 6),
    }  # fmt: skip


def test_dropout_in_rank_space_keeps_the_mean():
    torch.manual_seed(0)
    module, _ = build({"dropout": 0.4})
    x, cache = draw(1, 5, 11), hl.Cache()
    module(x[:, :4], cache=cache)
    want = module(x[:, 4:], cache=cache, update_cache=False).detach()
    module.train()
    with torch.no_grad():
        draws = torch.stack([module(x[:, 4:], cache=cache, update_cache=False) for _ in range(2000)])
    spread = draws.std(0)
    assert (spread > 1e-3).all()
    assert ((draws.mean(0) - want).abs() < 5 * spread / 2000**0.5).all()


def test_full_ranks_are_mha():
    """With B the rows of mha's heads (k_b[r] = R times head r) and A the unit vectors, every head is mha's."""
    D, H, K = 8, 4, 5
    options = {"hidden_size": D, "num_heads": H, "head_dim": K, "rope_theta": None}
    ranks = {"q_rank": H, "k_rank": H, "v_rank": H}
    tpa = hl.attention("tpa", **options, **ranks, qkv_bias=True).double()
    mha = randomise(hl.attention("mha", **options).double())
    with torch.no_grad():
        for letter in "qkv":
            getattr(tpa, f"{letter}_a").weight.zero_()
            getattr(tpa, f"{letter}_a").bias.copy_(torch.eye(H).flatten())
            getattr(tpa, f"{letter}_b").weight.copy_(H * getattr(mha, f"{letter}_proj").weight)
            getattr(tpa, f"{letter}_b").bias.zero_()
        tpa.o_proj.weight.copy_(mha.o_proj.weight)
    x = draw(2, 5, D)
    assert_close(tpa(x).detach(), mha(x).detach(), "mha", 1e-12)


def test_kv_only_with_rank_one_and_equal_heads_is_mqa():
    """A = 1 for every head: one shared key and value, turned by position."""
    D, H, K = 8, 4, 6
    tpa = hl.attention("tpa", hidden_size=D, num_heads=H, head_dim=K, kv_only=True, k_rank=1, v_rank=1, qkv_bias=True)
    mqa = randomise(hl.attention("mqa", hidden_size=D, num_heads=H, head_dim=K, qkv_bias=True).double())
    tpa = tpa.double()
    with torch.no_grad():
        for letter in "kv":
            getattr(tpa, f"{letter}_a").weight.zero_()
            getattr(tpa, f"{letter}_a").bias.fill_(1)
            getattr(tpa, f"{letter}_b").load_state_dict(getattr(mqa, f"{letter}_proj").state_dict())
        tpa.q_proj.load_state_dict(mqa.q_proj.state_dict())
        tpa.o_proj.load_state_dict(mqa.o_proj.state_dict())
    x = draw(2, 5, D)
    assert_close(tpa(x).detach(), mqa(x).detach(), "mqa", 1e-12)


def test_only_the_features_factor_is_turned():
    """The cache holds B_k turned and the rest as projected."""
    module, _ = build({})
    x, cache = draw(1, 3, 11), hl.Cache()
    module(x, cache=cache)
    slots = cache.held(0).slots
    for name in ("k_a", "v_a", "v_b"):
        want = getattr(module, name)(x).unflatten(-1, (slots[name].shape[1], -1)).transpose(1, 2)
        assert torch.equal(slots[name], want)
    plain = module.k_b(x).unflatten(-1, (2, 6)).transpose(1, 2)
    assert torch.equal(slots["k_b"][:, :, :1], plain[:, :, :1]) and (slots["k_b"] - plain).abs()[:, :, 1:].max() > 1e-3
    lengths = [t.pow(2).sum(-1) for t in (slots["k_b"], plain)]
    assert_close(lengths[0].detach(), lengths[1].detach(), "length", 1e-12)


def test_paper_init():
    """A and B within Xavier's bound and near it, W_O zero: the layer starts as nothing, and learns."""
    torch.manual_seed(0)
    module = hl.attention("tpa", hidden_size=64, num_heads=8, init="paper")
    assert not module.o_proj.weight.any()
    for name in ("q_a", "q_b", "k_a", "k_b", "v_a", "v_b"):
        weight = getattr(module, name).weight
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.95 * bound < weight.abs().max() <= bound, name
    default = hl.attention("tpa", hidden_size=64, num_heads=8)
    assert default.o_proj.weight.any() and default.q_a.weight.abs().max() <= 1 / 8
    model = hl.build_model(
        ("tpa", {"init": "paper"}), vocab_size=11, hidden_size=64, num_layers=1, num_heads=8, intermediate_size=8,
        max_positions=16,
    )  # fmt: skip
    assert not model.model.layers[0].self_attn.o_proj.weight.any()


def test_defaults_and_bounds():
    config = hl.attention("tpa", hidden_size=768, num_heads=34, head_dim=64).config
    assert (config.q_rank, config.k_rank, config.v_rank, config.kv_only) == (6, 2, 2, False)
    small = hl.attention("tpa", hidden_size=8, num_heads=4).config
    assert (small.q_rank, small.k_rank, small.v_rank) == (2, 2, 2)
    only = hl.attention("tpa", hidden_size=8, num_heads=1, kv_only=True).config
    assert (only.q_rank, only.k_rank, only.v_rank) == (None, 1, 1)


@pytest.mark.parametrize("kv_only", [False, True])
def test_costs_equal_the_closed_form(kv_only):
    D, H, K, Rk, Rv, T = 64, 8, 16, 2, 3, 32
    Rq = 0 if kv_only else 5
    ranks = {"kv_only": True} if kv_only else {"q_rank": Rq}
    cost = hl.cost("tpa", hidden_size=D, num_heads=H, head_dim=K, k_rank=Rk, v_rank=Rv, tokens=T, **ranks)
    q = D * H * K if kv_only else D * Rq * (H + K)
    weights = q + D * (Rk + Rv) * (H + K) + H * K * D
    assert cost.parameters == weights
    assert cost.cache_elements_per_token == (Rk + Rv) * (H + K)
    products = (Rq + Rk + Rv) * H * K * T
    assert cost.flops_full == 2 * (weights * T + products + T * T * H * 2 * K)
    assert cost.flops_exact == 2 * (weights * T + products + T * (T + 1) // 2 * H * 2 * K)
    parts = {part.step: part.flops_exact for part in cost.parts}
    assert parts["expand"] == 2 * (Rk + Rv) * H * K * T and parts["score"] == 2 * T * (T + 1) // 2 * H * 2 * K


def test_published_cache():
    """2 R (H + K) at R_k = R_v = R."""
    assert hl.cost("tpa", hidden_size=768, num_heads=34, head_dim=64).cache_elements_per_token == 2 * 2 * (34 + 64)


def test_state_dict_names_and_shapes():
    shapes = {n: tuple(t.shape) for n, t in build({"value_dim": 5})[0].state_dict().items()}
    assert shapes == {
        "q_a.weight": (12, 11),
        "q_b.weight": (18, 11),
        "k_a.weight": (8, 11),
        "k_b.weight": (12, 11),
        "v_a.weight": (16, 11),
        "v_b.weight": (20, 11),
        "o_proj.weight": (11, 20),
    }
    only = build({"kv_only": True, "q_rank": None})[0].state_dict()
    assert only["q_proj.weight"].shape == (24, 11) and "q_a.weight" not in only


@pytest.mark.parametrize("cached", [False, True])
def test_maps_are_the_patterns(cached):
    module, s = build({})
    x, cache = draw(1, 5, 11), None
    if cached:
        cache = hl.Cache()
        module(x[:, :4], cache=cache)
    maps = module.maps(x[:, 4:] if cached else x, **({"cache": cache} if cached else {}))
    want = oracle.patterns(dict(module.named_parameters()), x[0], s)
    assert_close(maps.patterns[0], want[:, -1:] if cached else want, "patterns", 1e-10)
    v = torch.stack([torch.stack(oracle.heads(dict(module.named_parameters()), t, s)[2]) for t in x[0]]).detach()
    out = torch.einsum("bhgts,sgv->bthv", maps.effective, v).flatten(2) @ module.o_proj.weight.T.detach()
    assert_close(out, module(x).detach()[:, -out.shape[1] :], "effective map", 1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_logits_stay_finite(dtype):
    """Logits of magnitude 1e3, with and without a cache."""
    module = hl.attention("tpa", hidden_size=32, num_heads=4).to(dtype).eval()
    x = torch.randn(2, 7, 32, dtype=dtype)
    ready = module._prepare(x)
    k, _ = module.expand(ready.handle)
    peak = (ready.q.float() @ k.float().transpose(-1, -2)).abs().max() * module._scale(ready.q)
    with torch.no_grad():
        module.q_a.weight.mul_((1e3 / peak) ** 0.5)
        module.q_b.weight.mul_((1e3 / peak) ** 0.5)
    x.requires_grad_()
    cache = hl.Cache()
    out = torch.cat([module(x), module(x[:, :5], cache=cache), module(x[:, 5:], cache=cache)], 1)
    assert_close(out[:, 7:].detach().float(), out[:, :7].detach().float(), "cached", 0.05)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_heads": 2}, ["tpa", "4", "2"]),
        ({"k_rank": 0}, ["k_rank", "0"]),
        ({"v_rank": -2}, ["v_rank", "-2"]),
        ({"q_rank": 5}, ["q_rank", "5", "4"]),
        ({"k_rank": 9}, ["k_rank", "9", "4"]),
        ({"value_dim": 3, "v_rank": 4}, ["v_rank", "4", "3"]),
        ({"q_rank": 2, "kv_only": True}, ["q_rank", "2", "kv_only"]),
        ({"qk_norm": "width"}, ["qk_norm", "tpa", "gqa"]),
        ({"init": "papers"}, ["papers", "paper"]),
        ({"latent_dim": 4}, ["unknown", "latent_dim", "tpa"]),
        ({"plain_dim": 4}, ["unknown", "plain_dim", "tpa"]),
        ({"kv_only": 1}, ["kv_only", "1"]),
        ({"base": "mla"}, ["base", "tpa", "mla"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("tpa", **{"hidden_size": 16, "num_heads": 4, **options})
    message = str(caught.value)
    assert "\n" not in message and all(word in message for word in words), message


@pytest.mark.parametrize("option", ["k_rank", "v_rank"])
def test_other_bases_refuse_its_sizes(option):
    words = {"unknown option '{option}' of {name}": ("mha", "gqa"), "{option} belongs to base tpa": ("iha", "sas")}
    for text, name in ((text, name) for text, names in words.items() for name in names):
        with pytest.raises(HeadloomError, match=text.format(option=option, name=name)):
            hl.attention(name, hidden_size=16, num_heads=4, **{option: 2})
