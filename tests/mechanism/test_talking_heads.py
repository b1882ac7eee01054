"""Talking heads against the loop oracle; its exact start, graft, blocks, cost and maps."""

import pytest
import torch
from oracles import talking_heads as oracle
from oracles.common import settings
from oracles.compare import COMMON_OPTIONS, assert_close, assert_matches, assert_rounds, draw, randomise, sides
from oracles.modules import training_peak

import headloom as hl
from headloom.bench.memory import peak_bytes
from headloom.core.errors import HeadloomError
from headloom.ops import blocks, scores
from headloom.ops.mixing import mix_scores

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
    module = hl.attention("talking_heads", **merged).double()
    return randomise(module, seed, 0.4).eval(), settings("talking_heads", **merged)


@pytest.mark.parametrize("base", [MHA, GQA], ids=["mha", "gqa"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, base):
    module, s = build(base, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides("left"))


@pytest.mark.parametrize("base", ["mla", "tpa", "mqa", "mha"])
@pytest.mark.parametrize(
    ("kind", "options"), [("left", {}), ("documents", {"window": 2}), ("offset", {"causal": False})]
)
def test_other_bases_equal_the_oracle(kind, options, base):
    sizes = {**MHA, "base": base, "num_kv_heads": 1 if base == "mqa" else 3}
    module, s = build(sizes, options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 2), (False, None), (False, 2)])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, causal, window):
    module, s = build(GQA, {"causal": causal, "window": window})
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("mode", [{}, {"window": 2}, {"causal": False}, {"causal": False, "window": 2}])
@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
def test_blocks_of_any_size_equal_the_oracle(kind, mode, rows, monkeypatch):
    """Several query blocks, each made again in the backward: the gradients of both mixes included."""
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS", rows * 2 * 3 * 5)
    module, s = build(MHA, mode)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def test_dead_rows_make_no_nan_on_the_way():
    """Not even one that a mask would hide again: torch's anomaly mode would stop there."""
    module, _ = build(MHA, {})
    with torch.autograd.set_detect_anomaly(True):
        module(draw(2, 5, 11), **sides("holes")).sum().backward()


def start(name, **options):
    """The mechanism and its base with equal projections, freshly initialised."""
    sizes = {**GQA, **options}
    module = hl.attention("talking_heads", **sizes).double().eval()
    base = hl.attention(name, **sizes).double().eval()
    base.load_state_dict({n: p for n, p in module.state_dict().items() if "_mix" not in n})
    return module, base


@pytest.mark.parametrize("kind", ["plain", "left", "documents"])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mha", {"num_kv_heads": 6}),
        ("gqa", {}),
        ("gqa", {"causal": False}),
        ("gqa", {"window": 2, "value_dim": 3}),
        ("gqa", {"softcap": 1.0}),
        ("mqa", {"base": "mqa", "num_kv_heads": 1}),
        ("mla", {"base": "mla", "num_kv_heads": 6}),
        ("tpa", {"base": "tpa", "num_kv_heads": 6}),
    ],
)
def test_the_start_is_the_base(name, options, kind):
    """The common fault, an identity added to a mix that already is one, doubles the logits."""
    module, base = start(name, **options)
    x = 2 * draw(2, 5, 11)
    assert_close(module(x, **sides(kind)).detach(), base(x, **sides(kind)).detach(), "start", 1e-13)
    with torch.no_grad():
        module.logit_mix.weight.mul_(2)
    assert (module(x, **sides(kind)) - base(x, **sides(kind))).abs().max() > 1e-3


def test_permuting_mixes_permute_heads():
    """logit_mix moves whole patterns; with weight_mix its inverse they come back to their own values."""
    module, base = start("mha", num_kv_heads=6)
    order = torch.tensor([2, 0, 1, 5, 3, 4])
    with torch.no_grad():
        module.logit_mix.weight.copy_(torch.eye(6)[order])
    x = draw(2, 5, 11)
    assert_rounds(module.maps(x).patterns, base.maps(x).patterns[:, order], "patterns", terms=11)
    with torch.no_grad():
        module.weight_mix.weight.copy_(torch.eye(6)[order].T)
    assert_close(module(x).detach(), base(x).detach(), "back", 1e-13)


def test_names_and_extra_parameters():
    module = hl.attention("talking_heads", **GQA)
    mixes = {n: tuple(p.shape) for n, p in module.named_parameters() if "_proj" not in n}
    assert mixes == {"logit_mix.weight": (6, 6), "weight_mix.weight": (6, 6)}
    assert set(module.no_decay()) == set(mixes)
    assert module.config.exact
    half = module.to(torch.bfloat16)
    assert half.logit_mix.weight.dtype == torch.float32 and half.q_proj.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("training", [True, False])
def test_dropout_drops_mixed_weights(training):
    """After the mix each weight is dropped or grown by 1 / (1 - p); before it, none would be exactly 0."""
    sizes = {**MHA, "dropout": 0.5, "causal": False, "rope_theta": None, "value_dim": 7}
    module = randomise(hl.attention("talking_heads", **sizes).double(), 0, 0.4).train(training)
    x = draw(1, 7, 11)
    seen = []
    original = blocks._over_groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_over_groups", lambda a, b: seen.append(a) or original(a, b))
        module(x)
    weights, kept = module.maps(x).patterns, seen[-1].detach()
    if not training:
        assert_close(kept, weights, "weights", 1e-13)
        return
    dropped = kept == 0
    assert 0.3 < dropped.double().mean() < 0.7
    assert_close(kept[~dropped], 2 * weights[~dropped], "kept", 1e-13)


def test_runs_in_blocks_and_says_so():
    module, _ = build(MHA, {})
    with scores.paths() as ran:
        module(draw(2, 7, 11))
    assert dict(ran) == {"blocks": 1}


def test_maps_are_the_final_weights():
    module, s = build(GQA, {})
    x = draw(1, 5, 11)
    maps = module.maps(x)
    w = {n: p.detach() for n, p in module.named_parameters()}
    assert_close(maps.patterns[0], oracle.patterns(w, x[0], s), "patterns", 1e-12)
    assert maps.effective.shape == (1, 6, 2, 5, 5) and (maps.patterns < 0).any()
    assert_close(maps.effective.sum((2, 4))[0], w["weight_mix.weight"].sum(1)[:, None].expand(6, 5), "rows", 1e-12)
    assert torch.equal(module.row_sums(), w["weight_mix.weight"].sum(1))
    v = module.v_proj(x).unflatten(-1, (2, 4)).transpose(1, 2)
    heads = torch.einsum("bhgts,bgsv->bthv", maps.effective, v)
    assert_close(module(x).detach(), module.o_proj(heads.flatten(2)).detach(), "map", 1e-12)


@pytest.mark.parametrize("T", [8, 32])
@pytest.mark.parametrize("window", [None, 3])
def test_costs_equal_the_closed_form(T, window):
    D, H, G, K, V = 96, 8, 2, 16, 12
    sizes = {"hidden_size": D, "num_heads": H, "num_kv_heads": G, "head_dim": K, "value_dim": V, "window": window}
    found = hl.cost("talking_heads", tokens=T, **sizes)
    weights = D * (H * K + G * K + G * V + H * V)
    assert found.parameters == weights + 2 * H * H
    assert found.cache_elements_per_token == G * (K + V)
    pairs = sum(min(t + 1, window or T) for t in range(T))
    assert found.flops_exact == 2 * T * weights + 2 * pairs * (H * (K + V) + 2 * H * H)
    assert found.flops_full == 2 * T * weights + 2 * T * T * (H * (K + V) + 2 * H * H)
    assert {p.step: p.flops_exact for p in found.parts}["score"] == 2 * pairs * (H * (K + V) + 2 * H * H)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_huge_logits_stay_finite(dtype):
    module = hl.attention("talking_heads", **GQA)
    with torch.no_grad():
        module.q_proj.weight.mul_(60)
        module.k_proj.weight.mul_(60)
    x = draw(2, 9, 11).float()
    q, k = module.project(x)
    assert (q[:, :1] @ k["k"][:, :1].mT).abs().max() / 2 > 1e3
    module, x = module.to(dtype), x.to(dtype).requires_grad_()
    out = module(x)
    out.float().pow(2).sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())


def test_autocast_does_not_round_the_mixes():
    weight, x = torch.randn(6, 6), torch.randn(2, 6, 5, 7)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = mix_scores(weight, x)
    assert mixed.dtype == torch.float32 and torch.equal(mixed, mix_scores(weight, x))


def test_a_graft_keeps_the_logits():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 37, "hidden_size": 24, "num_hidden_layers": 2, "intermediate_size": 29, "head_dim": 10}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    model = LlamaForCausalLM(config).double().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and "embed" not in name:
                p.normal_(0, 0.5)
    ids, real = torch.randint(3, 37, (2, 13)), torch.ones(2, 13, dtype=torch.long)
    real[0, :4] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=real).logits
        model = hl.graft(model, "talking_heads")
        report = model.graft_report
        after = model(ids, attention_mask=real).logits
        written = model.generate(ids, attention_mask=real, max_new_tokens=5, do_sample=False, use_cache=True)
        again = model.generate(ids, attention_mask=real, max_new_tokens=5, do_sample=False, use_cache=False)
    assert report.exact and report.parameters_added == 2 * 2 * 4 * 4
    assert_close(after[real.bool()], before[real.bool()], "logits", 1e-12)
    assert torch.equal(written, again)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"base": "mpa"}, ["mpa", "gqa", "mha", "mqa", "mla", "tpa"]),
        ({"num_kv_heads": 3}, ["3", "4"]),
        ({"mix": 1}, ["mix"]),
    ],
)
def test_bad_options_say_what_came_and_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("talking_heads", **{"hidden_size": 16, "num_heads": 4, **options})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_memory_is_that_of_a_few_blocks():
    """H = 8: all heads' scores of T = 2048 would take 128 MiB for each of the several copies, of T = 4096 512 MiB."""
    sizes = {"hidden_size": 128, "num_heads": 8, "head_dim": 16}
    assert training_peak("talking_heads", 2048, **sizes) < 64
    module, x = hl.attention("talking_heads", **sizes), torch.randn(1, 4096, 128)
    with torch.no_grad():
        assert peak_bytes(lambda: module(x)) < 64 * 2**20
