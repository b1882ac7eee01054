"""The second differential attention against the loop oracle; its reductions, cost, cache and maps."""

import pytest
import torch
from oracles import diff2 as oracle
from oracles.common import settings
from oracles.compare import COMMON_OPTIONS, assert_close, assert_matches, draw, randomise, sides

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops import scores

MHA = {"hidden_size": 11, "num_heads": 3, "head_dim": 6}
GQA = {"hidden_size": 11, "num_heads": 6, "num_kv_heads": 2, "head_dim": 4}
KINDS = ["left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents", "documents_win"]
OPTIONS = {
    **COMMON_OPTIONS,
    "default": {},
    "one_kv_head": {"num_kv_heads": 1},
}


def build(base, options, seed=0):
    merged = {**base, **options}
    return randomise(hl.attention("diff2", **merged).double(), seed, 0.4).eval(), settings("diff2", **merged)


@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, base):
    module, s = build(base, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None)])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, causal, window):
    module, s = build(GQA, {"causal": causal, "window": window})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def even_heads(module):
    """gqa whose queries are the first of each pair."""
    plain = hl.attention("gqa", **GQA).double()
    weights = {n: p for n, p in module.state_dict().items() if not n.startswith("lambda")}
    weights["q_proj.weight"] = weights["q_proj.weight"].reshape(6, 2, 4, 11)[:, 0].reshape(-1, 11)
    plain.load_state_dict(weights)
    return plain


@pytest.mark.parametrize("kind", ["plain", "left", "documents"])
def test_a_closed_gate_leaves_the_even_heads(kind):
    """lambda -> -inf: gqa of query heads 0, 2, ...; lambda = 0 takes half of the odd ones away."""
    module, _ = build(GQA, {})
    x = draw(2, 5, 11)
    x[..., 0] = 1.0
    with torch.no_grad():
        module.lambda_proj.weight.zero_()
        module.lambda_proj.weight[:, 0] = -1e4
    plain = even_heads(module)
    assert_close(module(x, **sides(kind)).detach(), plain(x, **sides(kind)).detach(), "closed", 1e-12)
    with torch.no_grad():
        module.lambda_proj.weight.zero_()
        pairs = module.q_proj.weight.view(6, 2, 4, 11)
        pairs[:, 1] = pairs[:, 0]
    assert_close(module(x, **sides(kind)).detach(), plain(x, **sides(kind)).detach() / 2, "half", 1e-12)


def test_the_gate_is_the_query_tokens_own():
    """With a cache, each new token's gate comes from that token: a wrong shape would broadcast."""
    module, _ = build(GQA, {})
    x, cache = draw(2, 4, 11), hl.Cache()
    steps = torch.cat([module(x[:, t : t + 1], cache=cache) for t in range(4)], 1)
    assert_close(steps.detach(), module(x).detach(), "steps", 1e-12)


def test_state_dict_and_first_values():
    module = hl.attention("diff2", **GQA)
    shapes = {name: tuple(p.shape) for name, p in module.state_dict().items()}
    assert shapes == {
        "q_proj.weight": (48, 11),
        "k_proj.weight": (8, 11),
        "v_proj.weight": (8, 11),
        "o_proj.weight": (11, 24),
        "lambda_proj.weight": (6, 11),
    }
    assert 0 < module.lambda_proj.weight.abs().max() <= 11**-0.5


def test_stays_fused():
    module, _ = build(GQA, {"window": 3})
    with scores.paths() as ran:
        module(draw(2, 7, 11))
    assert dict(ran) == {"fused": 1}


def test_patterns_and_the_effective_map():
    module, _ = build(GQA, {})
    x, real = draw(2, 5, 11), torch.ones(2, 5, dtype=torch.bool)
    real[0, :2] = False
    maps = module.maps(x, padding=real)
    assert maps.patterns.shape == (2, 12, 5, 5) and maps.effective.shape == (2, 6, 2, 5, 5)
    gate = 1 / (1 + torch.exp(-x @ module.lambda_proj.weight.T))
    wanted = (1 - gate).transpose(1, 2) * real[:, None]
    assert_close(maps.effective.sum((2, 4)), wanted.detach(), "rows", 1e-12)
    v = module.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
    heads = torch.einsum("bhgts,bgsv->bthv", maps.effective, v)
    assert_close(module(x, padding=real).detach(), module.o_proj(heads.flatten(2)).detach(), "map", 1e-12)


@pytest.mark.parametrize("T", [8, 32])
def test_costs_equal_the_closed_form(T):
    D, H, G, K, V = 96, 8, 2, 16, 12
    sizes = {"hidden_size": D, "num_heads": H, "num_kv_heads": G, "head_dim": K, "value_dim": V}
    found = hl.cost("diff2", tokens=T, **sizes)
    weights = D * (2 * H * K + G * K + G * V + H * V) + D * H
    assert found.parameters == weights
    assert found.parameters - hl.cost("gqa", tokens=T, **sizes).parameters == D * H * K + D * H
    assert found.cache_elements_per_token == G * (K + V)
    pairs = T * (T + 1) // 2
    assert found.flops_exact == 2 * T * weights + 2 * pairs * 2 * H * (K + V)
    assert found.flops_full == 2 * T * weights + 2 * T * T * 2 * H * (K + V)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits_stay_finite(dtype):
    module = hl.attention("diff2", **GQA)
    with torch.no_grad():
        module.q_proj.weight.mul_(60)
        module.k_proj.weight.mul_(60)
        module.lambda_proj.weight.mul_(1000)
    x = draw(2, 9, 11).float()
    q, k = module.project(x)
    assert (q[:, :1] @ k["k"][:, :1].mT).abs().max() / 2 > 1e3
    module, x = module.to(dtype), x.to(dtype).requires_grad_()
    out = module(x)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_kv_heads": 8}, ["num_kv_heads", "8", "4"]),
        ({"base": "mla"}, ["mla", "gqa", "mqa"]),
        ({"query_heads": 8}, ["query_heads"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("diff2", **{"hidden_size": 16, "num_heads": 4, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_cached_generation_and_grafts():
    """A model of it writes the same with and without a cache; a graft is refused, its q_proj being twice as high."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from headloom.hf import build_model

    sizes = {"vocab_size": 37, "hidden_size": 24, "head_dim": 6, "intermediate_size": 29}
    model = build_model(("diff2", {"num_kv_heads": 2}), num_layers=2, num_heads=4, max_positions=64, **sizes)
    model = randomise(model.double(), 0, 0.6).eval()
    ids, real = torch.randint(3, 37, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    real[0, :4] = 0
    call = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(ids, use_cache=True, **call), model.generate(ids, use_cache=False, **call))
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
    llama = LlamaForCausalLM(config)
    with pytest.raises(
        HeadloomError, match=r"^diff2 does not start as the attention it replaces: pass allow_change=True"
    ):
        hl.graft(llama, "diff2")
    with pytest.raises(HeadloomError, match=r"q_proj .* does not fit"):
        hl.graft(llama, "diff2", allow_change=True)
    assert type(llama) is LlamaForCausalLM
