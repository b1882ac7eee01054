"""Interleaved Head Attention against the loop oracles: every reading, order, phase, collapse and mask."""

import itertools

import pytest
import torch
from oracles import iha as oracle
from oracles.common import settings
from oracles.compare import COMMON_OPTIONS, assert_close, assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError

MHA = {"hidden_size": 11, "num_heads": 3, "head_dim": 4, "pseudo_heads": 2, "init": "normal"}
GQA = {**MHA, "num_heads": 4, "num_kv_heads": 2, "pseudo_heads": 3}
PAIRED = {**MHA, "interaction": "paired", "phase": "token", "collapse": "mean"}
PAIRED_GQA = {**GQA, "interaction": "paired", "phase": "token", "collapse": "mean"}
CHOICES = list(itertools.product(["virtual", "token"], ["virtual", "token"], ["full", "head", "mean"]))

OPTIONS = {
    **COMMON_OPTIONS,
    "window3": {"window": 3},
    "identity_encoder": {"score": "identity", "causal": False, "rope_theta": None, "scale": 1.0},
    "one_pseudo_head": {"pseudo_heads": 1},
    "three_pseudo_heads": {"pseudo_heads": 3},
    "default_pseudo_heads": {"pseudo_heads": None},
    "expanded_cache": {"cache": "expanded"},
    "all": {"qkv_bias": True, "qk_norm": "head", "softcap": 1.1, "value_dim": 7, "window": 2, "rotary_dim": 2},
}


def build(base, options, seed=0):
    merged = {**base, **options}
    module = randomise(hl.attention("iha", **merged).double(), seed).eval()
    return module, settings("iha", **merged)


def pseudo_patterns(module, x, **call):
    """(B, H, T P, S P), token-major."""
    B, T, H, P = *x.shape[:2], module.config.num_heads, module.config.pseudo_heads
    return module.maps(x, **call).patterns.reshape(B, H, T * P, T * P)


@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize(("order", "phase", "collapse"), CHOICES)
def test_interleaved_equals_the_oracle(order, phase, collapse, base, kind):
    module, s = build(base, {"order": order, "phase": phase, "collapse": collapse})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("order", ["virtual", "token"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_interleaved_options_equal_the_oracle(options, order):
    module, s = build(MHA, {"order": order, **options})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize("order", ["virtual", "token"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None), (False, 2)])
@pytest.mark.parametrize("kind", ["right", "holes", "documents", "alternating", "offset", "restart", "documents_win"])
def test_interleaved_side_inputs_equal_the_oracle(kind, causal, window, order):
    module, s = build(GQA, {"order": order, "phase": order, "causal": causal, "window": window, "pseudo_heads": 2})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("base", [PAIRED, PAIRED_GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize(
    "options",
    [{}, *({k: v for k, v in o.items() if k != "out_bias"} for o in OPTIONS.values())],
    ids=["plain", *OPTIONS],
)
def test_paired_equals_the_independent_statement(options, base, kind):
    module, s = build(base, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def test_visible_keys_per_pseudo_query():
    """T=3, P=2: 1,2,3,4,5,6 keys in virtual order, 2,2,4,4,6,6 in token order, all 6 without causality."""
    x = draw(1, 3, 11)
    for order, causal, counts in [
        ("virtual", True, [1, 2, 3, 4, 5, 6]),
        ("token", True, [2, 2, 4, 4, 6, 6]),
        ("virtual", False, [6] * 6),
        ("token", False, [6] * 6),
    ]:
        module, s = build(MHA, {"order": order, "causal": causal})
        found = (pseudo_patterns(module, x) != 0).sum(-1)
        assert found[0].tolist() == [counts] * 3
        assert (oracle.patterns(dict(module.named_parameters()), x[0], s) != 0).sum(-1).tolist() == [counts] * 3


def test_window_means_real_tokens():
    """T=6, W=4, P=2 sees 2,4,6,8,8,8 pseudo-keys in token order and one fewer at each first pseudo-query else."""
    x = draw(1, 6, 11)
    module, _ = build(MHA, {"order": "token", "window": 4})
    assert (pseudo_patterns(module, x) != 0).sum(-1)[0, 0].tolist() == [2, 2, 4, 4, 6, 6, 8, 8, 8, 8, 8, 8]
    module, _ = build(MHA, {"order": "virtual", "window": 4})
    assert (pseudo_patterns(module, x) != 0).sum(-1)[0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 7, 8, 7, 8]


@pytest.mark.parametrize("order", ["virtual", "token"])
def test_packed_documents_do_not_leak(order):
    """Lengths [3, 2], P=2: pseudo-tokens 0-5 and 6-9 are two blocks, and each equals the document alone."""
    module, _ = build(MHA, {"order": order, "phase": order})
    x, documents = draw(1, 5, 11), torch.tensor([[0, 0, 0, 1, 1]])
    seen = pseudo_patterns(module, x, documents=documents)[0, 0] != 0
    assert not seen[:6, 6:].any() and not seen[6:, :6].any()
    assert seen[5, :6].all() and seen[9, 6:].all()
    alone = torch.cat([module(x[:, :3]), module(x[:, 3:])], dim=1)
    assert_close(module(x, documents=documents).detach(), alone.detach(), "packed", 1e-12)


def test_one_pseudo_head_is_a_reparameterisation():
    """P=1, G=H, no norm: the mixes folded into the projections of a plain mha give the same output."""
    module, _s = build(MHA, {"pseudo_heads": 1})
    plain = hl.attention("mha", hidden_size=11, num_heads=3, head_dim=4).double()
    w = module.state_dict()
    with torch.no_grad():
        for name in "qkv":
            heads = w[f"{name}_proj.weight"].reshape(3, 4, 11)
            folded = torch.einsum("hm,mkd->hkd", w[f"{name}_mix.weight"][:, 0], heads).reshape(12, 11)
            getattr(plain, f"{name}_proj").weight.copy_(folded)
        out = torch.einsum("dhv,hg->dgv", w["o_proj.weight"].reshape(11, 3, 4), w["out_mix.weight"][:, :, 0])
        plain.o_proj.weight.copy_(out.reshape(11, 12))
    x = draw(2, 7, 11)
    assert_close(module(x).detach(), plain(x).detach(), "folded output", 1e-13)


def test_rotation_commutes_with_mixing_and_norm_does_not():
    """Mixing a norm's inputs differs from mixing its outputs, and the module does the second."""
    module, s = build(MHA, {"qk_norm": "head", "phase": "token"})
    x = draw(1, 5, 11)
    mix = module.q_mix.weight
    q = module.q_proj(x).reshape(5, 3, 4)

    def norm(t):
        return t / (t.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * module.q_norm.weight

    def turn(t):
        angle = torch.arange(5.0, dtype=torch.float64)[:, None] * torch.tensor([1.0, 0.01], dtype=torch.float64)
        cos, sin = angle.cos(), angle.sin()
        cos, sin = (c.reshape(5, *[1] * (t.dim() - 2), 2) for c in (cos, sin))
        a, b = t[..., :2], t[..., 2:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def mixed(t):
        return torch.einsum("hpm,tmk->thpk", mix, t)

    assert (turn(mixed(q)) - mixed(turn(q))).abs().max() < 1e-14
    assert (norm(mixed(q)) - mixed(norm(q))).abs().max() > 0.1
    assert_matches(module, oracle, s, x)


@pytest.mark.parametrize("collapse", ["full", "head", "mean"])
@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
def test_maps_equal_the_oracle_and_reproduce_the_output(base, collapse):
    """Every pseudo-head pattern, and M with out_h = sum_m M[h, m] v_m."""
    module, s = build(base, {"collapse": collapse})
    x = draw(1, 5, 11)
    maps, w = module.maps(x), dict(module.named_parameters())
    patterns = pseudo_patterns(module, x)[0]
    assert_close(patterns.detach(), oracle.patterns(w, x[0], s), "patterns")
    assert_close(patterns.sum(-1).detach(), torch.ones(s.num_heads, 5 * s.pseudo_heads).double(), "row sums")
    effective = maps.effective[0].detach()
    assert_close(effective, oracle.effective(w, x[0], s), "effective map")
    values = module.v_proj(x)[0].reshape(5, s.num_kv_heads, 4)
    heads = torch.einsum("hmtn,nmv->thv", effective, values).reshape(5, -1)
    assert_close(module.o_proj(heads).detach(), module(x)[0].detach(), "output from the map")


@pytest.mark.parametrize("collapse", ["full", "head", "mean"])
def test_state_dict_names_and_shapes(collapse):
    module = hl.attention("iha", **{**GQA, "collapse": collapse})
    wanted = {
        "q_proj.weight": (16, 11),
        "k_proj.weight": (8, 11),
        "v_proj.weight": (8, 11),
        "o_proj.weight": (11, 16),
        "q_mix.weight": (4, 3, 4),
        "k_mix.weight": (4, 3, 2),
        "v_mix.weight": (4, 3, 2),
        "out_mix.weight": {"full": (4, 4, 3), "head": (4, 3), "mean": None}[collapse],
    }
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {name: shape for name, shape in wanted.items() if shape}
    extra = sum(p.numel() for n, p in module.named_parameters() if "mix" in n)
    assert extra == 4 * 3 * (4 + 2 * 2) + {"full": 4 * 4 * 3, "head": 4 * 3, "mean": 0}[collapse]


def test_paired_state_dict_has_no_out_mix():
    names = set(hl.attention("iha", **PAIRED).state_dict())
    assert {n for n in names if "mix" in n} == {"q_mix.weight", "k_mix.weight", "v_mix.weight"}


def test_defaults_are_the_papers():
    config = hl.attention("iha", hidden_size=8, num_heads=2).config
    assert hl.attention("iha", hidden_size=8, num_heads=2).q_mix.weight.shape == (2, 2, 2)
    found = (
        config.interaction,
        config.order,
        config.phase,
        config.collapse,
        config.init,
        config.init_std,
        config.cache,
    )
    assert found == ("interleaved", "virtual", "virtual", "full", "identity", 0.3, "base")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "identity", "collapse": "mean", "phase": "token", "order": "token"}, ["identity", "mean"]),
        ({"init": "carrier", "collapse": "mean", "phase": "token"}, ["carrier", "mean"]),
        ({"init": "carrier", "phase": "virtual"}, ["carrier", "phase"]),
        ({"interaction": "paired", "phase": "token", "collapse": "full"}, ["paired", "mean"]),
        ({"interaction": "paired", "phase": "token", "collapse": "head"}, ["paired", "mean"]),
        ({"interaction": "paired", "phase": "virtual", "collapse": "mean"}, ["paired", "token"]),
        ({"interaction": "pared"}, ["pared", "paired"]),
        ({"order": "tokens"}, ["tokens", "token"]),
        ({"phase": "virtul"}, ["virtul", "virtual"]),
        ({"collapse": "fill"}, ["fill", "full"]),
        ({"init": "identty"}, ["identty", "identity"]),
        ({"cache": "expand"}, ["expand", "expanded"]),
        ({"pseudo_heads": 0}, ["pseudo_heads", "0"]),
        ({"pseudo_head": 2}, ["pseudo_head", "pseudo_heads"]),
        ({"init_std": -1.0}, ["init_std", "-1"]),
        ({"num_kv_heads": 3}, ["3", "4"]),
        ({"window": 0}, ["window", "0"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("iha", **{"hidden_size": 16, "num_heads": 4, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_pictures_are_by_head_and_pseudo_head():
    attn = hl.attention("iha", hidden_size=12, num_heads=3, num_kv_heads=1, pseudo_heads=2, rope_theta=None)
    q, k, v, out = attn.pictures()
    assert (q.weight, q.down, q.across) == ("q_mix.weight", "to head.pseudo-head", "from head")
    assert q.rows == ("0.0", "0.1", "1.0", "1.1", "2.0", "2.1") and q.columns == ("0", "1", "2")
    assert k.columns == v.columns == ("0",)
    assert (out.rows, out.columns) == (q.columns, q.rows)
    with torch.no_grad():
        attn.q_mix.weight.zero_()[2, 1, 1] = 1.0  # to pseudo-head 1 of head 2, from head 1
    matrix = attn.q_mix.weight.reshape(len(q.rows), len(q.columns))
    assert matrix[q.rows.index("2.1"), q.columns.index("1")] == 1.0 == matrix.sum()
