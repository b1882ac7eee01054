"""mha, gqa and mqa against the loop oracle: outputs and every gradient, 1e-10 in float64."""

import pytest
import torch
from oracles import gqa as oracle
from oracles.common import settings
from oracles.compare import assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError

MHA = {"hidden_size": 11, "num_heads": 3, "head_dim": 6}
GQA = {"hidden_size": 11, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
KINDS = ["plain", "left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
KINDS += ["padded_restart", "documents_win"]

OPTIONS = {
    "default": {},
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window2": {"window": 2},
    "window3": {"window": 3},
    "window9": {"window": 9},
    "encoder_window1": {"causal": False, "window": 1},
    "encoder_window2": {"causal": False, "window": 2},
    "encoder_window3": {"causal": False, "window": 3},
    "no_rotary": {"rope_theta": None},
    "theta": {"rope_theta": 50.0},
    "rotary2": {"rotary_dim": 2},
    "rotary4": {"rotary_dim": 4, "rope_theta": 30.0},
    "norm_head": {"qk_norm": "head"},
    "norm_width": {"qk_norm": "width"},
    "norm_eps": {"qk_norm": "head", "norm_eps": 0.3},
    "norm_width_eps": {"qk_norm": "width", "norm_eps": 0.3},
    "softcap": {"softcap": 0.7},
    "softcap_window_encoder": {"softcap": 1.3, "window": 2, "causal": False},
    "value_dim": {"value_dim": 5},
    "value_dim_wide": {"value_dim": 7, "window": 2},
    "qkv_bias": {"qkv_bias": True},
    "out_bias": {"out_bias": True},
    "scale": {"scale": 0.3},
    "scale_window": {"scale": -0.2, "window": 3},
    "identity": {"score": "identity"},
    "identity_encoder": {"score": "identity", "causal": False, "scale": 1.0, "rope_theta": None},
    "identity_window": {"score": "identity", "window": 2, "value_dim": 3},
    "hard": {"score": "hard"},
    "hard_encoder": {"score": "hard", "causal": False},
    "hard_window": {"score": "hard", "window": 2},
    "odd_width": {"head_dim": 5, "rope_theta": None},
    "all": {
        "qkv_bias": True, "out_bias": True, "qk_norm": "head", "softcap": 1.1, "value_dim": 7, "window": 3,
        "rotary_dim": 2, "scale": 0.4,
    },
}  # fmt: skip


def build(name, base, options):
    merged = {**base, **options}
    module = randomise(hl.attention(name, **merged).double()).eval()
    return module, settings(name, **merged)


@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_mha_equals_the_oracle(options, kind):
    module, s = build("mha", MHA, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("kind", ["plain", "left"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gqa_equals_the_oracle(options, kind):
    module, s = build("gqa", GQA, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_every_side_input_equals_the_oracle(kind, window, causal):
    module, s = build("gqa", GQA, {"causal": causal, "window": window})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mqa", {"num_heads": 3}),
        ("gqa", {"num_heads": 6, "num_kv_heads": 3}),
        ("gqa", {"num_heads": 8}),
        ("gqa", {"num_heads": 3}),
        ("mqa", {"num_heads": 5, "value_dim": 3, "window": 2}),
    ],
)
def test_names_choose_the_key_value_heads(name, options):
    module, s = build(name, {"hidden_size": 11, "head_dim": 4}, options)
    assert module.k_proj.weight.shape == (s.num_kv_heads * 4, 11)
    assert_matches(module, oracle, s, draw(2, 7, 11))


@pytest.mark.parametrize("kind", ["plain", "left"])
@pytest.mark.parametrize("bias", [False, True])
def test_bit_projections_equal_the_oracle(kind, bias):
    module, s = build("mha", MHA, {"projection": "bit", "qkv_bias": bias, "out_bias": bias})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def test_tied_maxima_of_a_hard_row_share_the_weight():
    """With q = 0 every visible key is a maximum: row t is the mean of the first t + 1 values."""
    module, _ = build("mha", MHA, {"score": "hard"})
    with torch.no_grad():
        module.q_proj.weight.zero_()
    x = draw(1, 5, 11)
    values = x @ module.v_proj.weight.T
    means = torch.stack([values[:, : t + 1].mean(1) for t in range(5)], dim=1)
    torch.testing.assert_close(module(x), means @ module.o_proj.weight.T, atol=1e-12, rtol=0)


@pytest.mark.parametrize("options", [{}, {"window": 2}, {"causal": False}, {"softcap": 1.0}])
def test_dropout_drops_weights_and_keeps_their_mean(options):
    """Attention weights are dropped and rescaled by 1/(1-p): the mean over draws is the undropped output."""
    torch.manual_seed(0)
    module, s = build("mha", MHA, {"dropout": 0.4, **options})
    x = draw(1, 5, 11)
    want = oracle.output(dict(module.named_parameters()), x, s).detach()
    torch.testing.assert_close(module(x), want, atol=1e-10, rtol=0)
    module.train()
    with torch.no_grad():
        draws = module(x.expand(4000, 5, 11))
    spread = draws.std(0)
    assert (spread > 1e-3).all()
    assert ((draws.mean(0) - want[0]).abs() < 5 * spread / 4000**0.5).all()
    exact = module.v_proj(x)[0, 0] @ module.o_proj.weight.T
    if options.get("causal", True):
        ratio = draws[:, 0] @ exact / (exact @ exact)
        kept = module.v_proj(x)[0, 0].reshape(3, 6)
        heads = torch.stack([kept[h] @ module.o_proj.weight[:, 6 * h : 6 * h + 6].T for h in range(3)])
        solved = torch.linalg.lstsq(heads.T, draws[:, 0].T).solution
        assert (torch.minimum(solved.abs(), (solved - 1 / 0.6).abs()) < 1e-9).all()
        assert ratio.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("gqa", {"num_heads": 4, "num_kv_heads": 4}, ["mha"]),
        ("gqa", {"num_heads": 4, "num_kv_heads": 3}, ["4", "3"]),
        ("mha", {"num_heads": 4, "num_kv_heads": 2}, ["2"]),
        ("mqa", {"num_heads": 4, "num_kv_heads": 2}, ["2"]),
        ("mha", {"num_heads": 3, "hidden_size": 11}, ["11", "3"]),
        ("mha", {"num_heads": 0}, ["0"]),
        ("mha", {"num_heads": 4, "head_dim": 0}, ["0"]),
        ("mha", {"num_heads": 4, "window": 0}, ["window", "0"]),
        ("mha", {"num_heads": 4, "window": -3}, ["window", "-3"]),
        ("mha", {"num_heads": 4, "head_dim": 5}, ["5"]),
        ("mha", {"num_heads": 4, "rotary_dim": 3}, ["3"]),
        ("mha", {"num_heads": 4, "rotary_dim": 8}, ["8", "4"]),
        ("mha", {"num_heads": 4, "dropout": 1.5}, ["dropout", "1.5"]),
        ("mha", {"num_heads": 4, "dropout": -0.1}, ["dropout", "-0.1"]),
        ("mha", {"num_heads": 4, "qk_norm": "heads"}, ["heads", "head"]),
        ("mha", {"num_heads": 4, "score": "soft"}, ["soft", "softmax", "hard"]),
        ("mha", {"num_heads": 4, "projection": "bits"}, ["bits", "bit"]),
        ("mha", {"num_heads": 4, "softcap": 0.0}, ["softcap"]),
        ("mha", {"num_heads": 4, "norm_eps": 0.0}, ["norm_eps", "above 0"]),
        ("mha", {"num_heads": 4, "softcap": -1.0}, ["softcap"]),
        ("mha", {"num_heads": 4, "value_dim": 0}, ["value_dim"]),
        ("mha", {"num_heads": 4, "rope_theta": -1.0}, ["rope_theta"]),
        ("mha", {"num_heads": 4, "num_head": 4}, ["num_head", "num_heads"]),
        ("mha", {"num_heads": 4, "windw": 4}, ["windw", "window"]),
        ("mhaa", {"num_heads": 4}, ["mhaa", "mha"]),
        ("mha", {"num_heads": "4"}, ["num_heads", "4"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(name, options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention(name, **{"hidden_size": 16, **options})
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_state_dict_names_and_shapes():
    module = hl.attention(
        "gqa", hidden_size=11, num_heads=6, num_kv_heads=2, head_dim=4, value_dim=5, qkv_bias=True, out_bias=True
    )
    shapes = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (24, 11),
        "q_proj.bias": (24,),
        "k_proj.weight": (8, 11),
        "k_proj.bias": (8,),
        "v_proj.weight": (10, 11),
        "v_proj.bias": (10,),
        "o_proj.weight": (11, 30),
        "o_proj.bias": (11,),
    }


@pytest.mark.parametrize(("norm", "q", "k"), [("head", (4,), (4,)), ("width", (24,), (8,))])
def test_qk_norm_names_and_shapes(norm, q, k):
    shapes = {n: tuple(t.shape) for n, t in hl.attention("gqa", **GQA, qk_norm=norm).state_dict().items()}
    assert (shapes["q_norm.weight"], shapes["k_norm.weight"]) == (q, k)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["mha", "gqa", "mqa", "iha", "sas"])
def test_large_logits_stay_finite(name, dtype):
    """Logits of magnitude 1e3 in half precision: outputs and every gradient stay finite."""
    module = hl.attention(name, hidden_size=32, num_heads=4).to(dtype).eval()
    x = torch.randn(2, 9, 32, dtype=dtype)
    ready = module._prepare(x)
    k = module.expand(ready.handle)[0]
    k = k.repeat_interleave(ready.q.shape[1] // k.shape[1], 1)
    peak = (ready.q.float() @ k.float().transpose(-1, -2)).abs().max() * module._scale(ready.q)
    with torch.no_grad():
        module.q_proj.weight.mul_(1e3 / peak)
    x.requires_grad_()
    out = module(x)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())
