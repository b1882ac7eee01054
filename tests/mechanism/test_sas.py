"""Simulated Attention Score against the loop oracle: orders, kernels, merges, bases, inits."""

import itertools

import pytest
import torch
from oracles import sas as oracle
from oracles.common import settings
from oracles.compare import COMMON_OPTIONS, assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError

MHA = {"hidden_size": 11, "num_heads": 3, "head_dim": 4, "simulated_heads": 6, "simulated_width": 6, "kernel_size": 3}
GQA = {**MHA, "num_heads": 4, "num_kv_heads": 2, "simulated_heads": 8, "simulated_width": 10}
CHOICES = list(itertools.product(["head_first", "feature_first"], ["mean", "nonlinear", "full"], [1, 3, 5]))

OPTIONS = {
    **COMMON_OPTIONS,
    "kernel7": {"kernel_size": 7},
    "narrow": {"simulated_width": 4},
    "no_extra_heads": {"simulated_heads": 3},
    "defaults": {"simulated_heads": None, "simulated_width": None},
    "base_cache": {"cache": "base"},
    "value_dim_full": {"value_dim": 5, "aggregate": "full"},
    "value_dim_nonlinear": {"value_dim": 5, "aggregate": "nonlinear", "window": 2},
    "all": {"qkv_bias": True, "qk_norm": "head", "softcap": 1.1, "value_dim": 7, "window": 2, "rotary_dim": 2},
}


def build(base, options, seed=0):
    merged = {**base, **options}
    module = randomise(hl.attention("sas", **merged).double(), seed, 0.4).eval()
    return module, settings("sas", **merged)


@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize(("order", "aggregate", "kernel"), CHOICES)
def test_equals_the_oracle(order, aggregate, kernel, base):
    module, s = build(base, {"order": order, "aggregate": aggregate, "kernel_size": kernel})
    assert_matches(module, oracle, s, draw(1, 5, 11))


@pytest.mark.parametrize("order", ["head_first", "feature_first"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, order):
    module, s = build(MHA, {"order": order, **options})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize("aggregate", ["mean", "nonlinear", "full"])
@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None), (False, 2)])
@pytest.mark.parametrize("kind", ["right", "holes", "documents", "offset", "restart"])
def test_side_inputs_equal_the_oracle(kind, causal, window, aggregate):
    module, s = build(GQA, {"aggregate": aggregate, "causal": causal, "window": window, "kernel_size": 1})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize(("base", "kv"), [("mqa", 1), ("gqa", 2), ("mha", 4)])
def test_named_bases_equal_the_oracle(base, kv):
    options = {**GQA, "base": base, "num_kv_heads": kv}
    module = randomise(hl.attention("sas", **options).double(), 0, 0.4)
    assert module.head_k[0].weight.shape[1] == kv
    assert_matches(module, oracle, settings("sas", **options), draw(1, 5, 11))


def test_mean_of_projected_groups_is_projection_of_the_mean():
    """PEAA: group i holds heads i H .. i H + H - 1; permuting whole groups of values changes nothing, heads do."""
    module, _ = build(MHA, {"kernel_size": 1})
    x = draw(1, 5, 11)
    want = module(x).detach()
    w = module.state_dict()

    def permuted(order):
        moved = {
            n: t[order] if n.startswith("head_") and n.endswith(("0.weight", "0.bias")) else t for n, t in w.items()
        }
        for n in [n for n in w if n.startswith("head_") and ".1." in n]:
            moved[n] = w[n][order][:, order] if w[n].dim() > 1 else w[n][order]
        other = hl.attention("sas", **{**MHA, "kernel_size": 1}).double()
        other.load_state_dict(moved)
        return other(x).detach()

    assert (permuted([3, 4, 5, 0, 1, 2]) - want).abs().max() < 1e-12
    assert (permuted([1, 0, 2, 3, 4, 5]) - want).abs().max() > 1e-3


@pytest.mark.parametrize("aggregate", ["mean", "nonlinear", "full"])
def test_state_dict_names_and_shapes(aggregate):
    sizes = {**GQA, "value_dim": 5, "aggregate": aggregate}
    shapes = {name: tuple(tensor.shape) for name, tensor in hl.attention("sas", **sizes).state_dict().items()}
    wanted = {
        "q_proj.weight": (16, 11),
        "k_proj.weight": (8, 11),
        "v_proj.weight": (10, 11),
        "o_proj.weight": (11, 8 * 5 if aggregate == "full" else 4 * 5),
    }
    for name, heads in (("q", 4), ("k", 2), ("v", 2)):
        wanted |= {f"head_{name}.0.weight": (8, heads, 3), f"head_{name}.0.bias": (8,)}
        wanted |= {f"head_{name}.1.weight": (8, 8, 3), f"head_{name}.1.bias": (8,)}
    for name in "qk":
        wanted |= {f"feature_{name}.0.weight": (10, 4), f"feature_{name}.0.bias": (10,)}
        wanted |= {f"feature_{name}.1.weight": (10, 10), f"feature_{name}.1.bias": (10,)}
    if aggregate == "nonlinear":
        wanted |= {"head_o.0.weight": (8, 8), "head_o.0.bias": (8,), "head_o.1.weight": (4, 8), "head_o.1.bias": (4,)}
    assert shapes == wanted


@pytest.mark.parametrize(("kernel", "extra"), [(5, 57240), (1, 36504)])
def test_published_extra_parameters(kernel, extra):
    """E=36 from H=12, K=64, J=96: 57,240 extra parameters a layer at kernel 5, 36,504 at kernel 1."""
    sizes = {"hidden_size": 768, "num_heads": 12, "simulated_heads": 36, "simulated_width": 96, "kernel_size": kernel}
    with torch.device("meta"):
        module = hl.attention("sas", **sizes)
    assert sum(p.numel() for n, p in module.named_parameters() if not n.startswith(tuple("qkvo"))) == extra


def test_defaults():
    """simulated_heads = 3 H, simulated_width = 2 ceil(1.25 K / 2), kernel 5, head first, mean, default init."""
    module = hl.attention("sas", hidden_size=24, num_heads=4)
    assert module.head_q[0].weight.shape == (12, 4, 5) and module.feature_q[0].weight.shape == (8, 6)
    config = module.config
    found = (config.order, config.aggregate, config.init, config.init_std, config.cache, config.kernel_size)
    assert found == ("head_first", "mean", "default", 0.3, "expanded", 5)


IDENTITY = list(itertools.product(["head_first", "feature_first"], ["mean", "full"], [1, 3, 5]))


def identity_pair(kv, order, aggregate, kernel, **mode):
    torch.manual_seed(4)
    sizes = {"hidden_size": 13, "num_heads": 4, "num_kv_heads": kv, "head_dim": 6, **mode}
    base = hl.attention("mha" if kv == 4 else "gqa", **sizes).double().eval()
    options = {"simulated_heads": 12, "simulated_width": 10, "order": order, "aggregate": aggregate}
    sas = hl.attention("sas", **sizes, **options, kernel_size=kernel, init="identity").double().eval()
    sas.reset_heads()  # drawn and centred in float64: in float32 the zero sums hold to 1e-8
    weights = base.state_dict()
    if aggregate == "full":
        weights["o_proj.weight"] = weights["o_proj.weight"].repeat(1, 3) / 3
    sas.load_state_dict(weights, strict=False)
    return base, sas


@pytest.mark.parametrize("kind", ["plain", "left", "documents"])
@pytest.mark.parametrize("kv", [4, 2])
@pytest.mark.parametrize(("order", "aggregate", "kernel"), IDENTITY)
def test_identity_init_equals_the_base(order, aggregate, kernel, kv, kind):
    base, sas = identity_pair(kv, order, aggregate, kernel)
    x = draw(2, 5, 13)
    assert (sas(x, **sides(kind)) - base(x, **sides(kind))).abs().max() < 1e-12


@pytest.mark.parametrize(
    "mode",
    [
        {"causal": False},
        {"window": 2},
        {"rope_theta": None},
        {"rotary_dim": 2},
        {"value_dim": 5},
        {"scale": 0.3},
        {"qk_norm": "head"},
        {"qkv_bias": True, "out_bias": True},
        {"softcap": 1.0},
        {"causal": False, "window": 3},
    ],
)
@pytest.mark.parametrize("order", ["head_first", "feature_first"])
def test_identity_init_equals_the_base_in_every_mode(order, mode):
    base, sas = identity_pair(2, order, "mean", 3, **mode)
    x = draw(2, 7, 13)
    assert (sas(x) - base(x)).abs().max() < 1e-12


def test_identity_separates_the_copies_of_v():
    """Rows e = i H + h of head_v.0 differ between i at every tap and their mean is the tiling."""
    _, sas = identity_pair(2, "head_first", "mean", 3)
    weight = sas.head_v[0].weight.detach().reshape(3, 4, 2, 3)
    tiled = torch.zeros(4, 2, 3, dtype=torch.float64)
    for h in range(4):
        tiled[h, h // 2, 1] = 1
    assert (weight.mean(0) - tiled).abs().max() < 1e-6
    assert ((weight - tiled) != 0).all() and (weight - tiled).std() > 0.1


@pytest.mark.parametrize("rotary", [10000.0, None])
@pytest.mark.parametrize(("order", "aggregate"), [(o, a) for o, a, k in IDENTITY if k == 3])
def test_every_row_gets_a_gradient_within_two_steps(order, aggregate, rotary):
    """Only feature_k.1's bias on unrotated features never does (a shift of a row's logits)."""
    _base, sas = identity_pair(4, order, aggregate, 3, rope_theta=rotary)
    optimizer = torch.optim.AdamW(sas.parameters(), lr=1e-2, weight_decay=0.0)
    seen = {n: torch.zeros(p.shape[0], dtype=torch.bool) for n, p in sas.named_parameters()}
    for step in range(2):
        optimizer.zero_grad()
        (sas(draw(3, 7, 13, seed=step)) - draw(3, 7, 13, seed=step + 50)).pow(2).mean().backward()
        for name, p in sas.named_parameters():
            seen[name] |= p.grad.reshape(p.shape[0], -1).abs().amax(1) > 1e-14
        optimizer.step()
    for name, rows in seen.items():
        if name == "feature_k.1.bias" and order == "head_first":
            assert rows[:6].all() or rotary is None
        elif order == "head_first" or "bias" not in name:
            assert rows.all(), f"{name}: rows {(~rows).nonzero().flatten().tolist()} never move"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"init": "identity", "aggregate": "nonlinear"}, ["identity", "nonlinear"]),
        ({"simulated_width": 5}, ["simulated_width", "5"]),
        ({"simulated_width": 2}, ["simulated_width", "2"]),
        ({"simulated_heads": 7}, ["simulated_heads", "7", "4"]),
        ({"simulated_heads": 0}, ["simulated_heads", "0"]),
        ({"kernel_size": 4}, ["kernel_size", "4"]),
        ({"kernel_size": 0}, ["kernel_size", "0"]),
        ({"order": "heads_first"}, ["heads_first", "head_first"]),
        ({"aggregate": "max"}, ["max", "mean"]),
        ({"init": "identiti"}, ["identiti", "identity"]),
        ({"base": "gqua"}, ["gqua", "gqa"]),
        ({"cache": "bass"}, ["bass", "base"]),
        ({"num_kv_heads": 3}, ["3", "4"]),
        ({"simulated_head": 8}, ["simulated_head", "simulated_heads"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("sas", **{"hidden_size": 16, "num_heads": 4, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_pictures_are_from_head_to_simulated_head():
    attn = hl.attention("sas", hidden_size=8, num_heads=2, simulated_heads=4, simulated_width=6, kernel_size=3)
    shown = {picture.weight: picture for picture in attn.pictures()}
    assert list(shown) == [f"{name}.0.weight" for name in ("head_q", "head_k", "head_v", "feature_q", "feature_k")]
    head = shown["head_q.0.weight"]
    assert (head.down, head.across) == ("to simulated head", "from head.tap")
    assert head.rows == ("0", "1", "2", "3") and head.columns == ("0.0", "0.1", "0.2", "1.0", "1.1", "1.2")
    with torch.no_grad():
        attn.head_q[0].weight.zero_()[3, 1, 2] = 1.0  # to simulated head 3, from head 1 by the last tap
    assert attn.head_q[0].weight.reshape(4, 6)[3, head.columns.index("1.2")] == 1.0
    one = hl.attention("sas", hidden_size=8, num_heads=2, simulated_heads=4, simulated_width=6, kernel_size=1)
    assert one.pictures()[0].columns == ("0", "1") and one.pictures()[0].across == "from head"
