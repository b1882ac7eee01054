"""linear: the loop oracle in every chunking, documents in any order, the constant state, counts, memory, bad input."""

import pytest
import torch
from oracles import linear as oracle
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, draw, randomise, sides
from oracles.modules import training_peak

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.ops import linear

SIZES = {"hidden_size": 11, "num_heads": 6, "num_kv_heads": 2, "head_dim": 5, "chunk_size": 2}
OPTIONS = {
    "default": {},
    "one": {"chunk_size": 1},
    "three": {"chunk_size": 3},
    "whole": {"chunk_size": 9},
    "heads": {"num_kv_heads": 6},
    "value_dim": {"value_dim": 3},
    "norm_head": {"qk_norm": "head"},
    "norm_width": {"qk_norm": "width", "norm_eps": 0.3},
    "biases": {"qkv_bias": True, "out_bias": True},
    "mqa": {"base": "mqa", "num_kv_heads": 1},
}
KINDS = ["left", "right", "holes", "documents", "alternating", "offset", "restart", "padded_documents"]
KINDS += ["padded_restart", "documents_win"]


def build(**options):
    merged = {**SIZES, **options}
    return randomise(hl.attention("linear", **merged).double()).eval(), settings("linear", **merged)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", ["plain", "padded_documents"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_equal_the_oracle(options, kind, causal):
    module, s = build(causal=causal, **options)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_side_inputs_equal_the_oracle(kind, chunk, causal):
    module, s = build(causal=causal, chunk_size=chunk)
    assert_matches(module, oracle, s, draw(2, 5, 11), **sides(kind))


def test_bit_projections_equal_the_oracle():
    module, s = build(projection="bit", qkv_bias=True, out_bias=True)
    assert_matches(module, oracle, s, draw(1, 4, 11), **sides("plain"))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("past", [0, 3])
@pytest.mark.parametrize("documents", ["none", "long", "short", "mixed", "padded"])
def test_chunks_equal_products(documents, past, causal):
    """Many chunks, and documents that span, end at, start at and return after chunks: as the written-out products."""
    from headloom.ops.masks import Visibility

    S, G, H = 41, 2, 4
    place = torch.arange(S)
    ids = {
        "none": None,
        "long": torch.stack([place // 20, place // 8]),
        "short": torch.stack([place // 2, place]),
        "mixed": torch.stack([place % 3, (place * 7) % 5 // 2]),
        "padded": torch.stack([torch.where(place < 9, -1, 0), torch.where(place % 4 == 1, -1, place // 13)]),
    }[documents]
    q, k = draw(2 * H, S - past, 5).view(2, H, S - past, 5).abs(), draw(2 * G, S, 5, seed=2).view(2, G, S, 5).abs()
    v = draw(2 * G, S, 3, seed=3).view(2, G, S, 3)
    visibility = Visibility(S - past, S, causal, None, ids)
    want = torch.einsum(
        "bhts,bhsv->bhtv",
        linear.products(q, k, visibility.dense(device=q.device)),
        v.repeat_interleave(H // G, 1),
    )
    for chunk in (1, 2, 4, 7, 40, 64):
        assert_close(linear.attend(q, k, v, visibility, chunk), want, f"chunks of {chunk}", 1e-12)


def test_large_padding_and_another_document_leave_no_trace():
    """Sums are never taken and subtracted again: huge tokens elsewhere change nothing, not even the last bits."""
    module, _ = build()
    x = draw(1, 9, 11)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1]])
    huge = x.clone()
    huge[:, :3] = 1e12
    assert torch.equal(module(x, documents=documents)[:, 3:], module(huge, documents=documents)[:, 3:])
    real = documents.bool()
    assert torch.equal(module(x, padding=real)[:, 3:], module(huge, padding=real)[:, 3:])


@pytest.mark.parametrize("chunks", [[1] * 11, [4, 1, 6], [7, 4], [11], [2, 3, 3, 3]])
@pytest.mark.parametrize("kind", ["plain", "left", "holes", "documents", "mixed"])
def test_the_state_is_constant_and_stands_for_the_past(chunks, kind):
    """G K (V + 1) numbers a sequence from the first token on; token by token and in chunks as the full pass."""
    module, _ = build(value_dim=3)
    x, call = draw(2, 11, 11), {}
    real = torch.ones(2, 11, dtype=torch.bool)
    real[0, :6] = False
    if kind == "holes":  # whole calls of padding between real tokens
        real[0, :1], real[1, 2:8] = True, False
    if kind in ("left", "holes", "mixed"):
        call["padding"] = real
    if kind in ("documents", "mixed"):
        call["documents"] = torch.stack([torch.arange(11) // 4, torch.tensor([0] * 5 + [3] * 2 + [7] * 4)])
    cache, outs, first = hl.Cache(), [], 0
    for size in chunks:
        part = slice(first, first + size)
        outs.append(module(x[:, part], cache=cache, **{name: side[:, part] for name, side in call.items()}))
        first += size
        assert cache.nbytes() == 2 * 2 * 5 * (3 + 1) * 8 and cache.length(0) == first
    assert_close(torch.cat(outs, 1).detach(), module(x, **call).detach(), "cached", 1e-12)
    assert "11 tokens" in repr(cache)


def test_restarting_positions_open_a_document_after_a_state():
    module, _ = build()
    x, cache = draw(1, 6, 11), hl.Cache()
    positions = torch.tensor([[0, 1, 2, 0, 1, 2]])
    parts = [module(x[:, i : i + 1], positions=positions[:, i : i + 1], cache=cache) for i in range(6)]
    assert_close(torch.cat(parts, 1).detach(), module(x, positions=positions).detach(), "restart", 1e-12)
    cache, real = hl.Cache(), torch.tensor([[True, True, False, True, True, True]])  # 3 comes after 6, not after 0
    positions = torch.tensor([[5, 6, 0, 3, 4, 5]])
    calls = [{"positions": positions[:, i : i + 1], "padding": real[:, i : i + 1]} for i in range(6)]
    parts = [module(x[:, i : i + 1], cache=cache, **call) for i, call in enumerate(calls)]
    want = module(x, positions=positions, padding=real)
    assert_close(torch.cat(parts, 1).detach(), want.detach(), "restart after padding", 1e-12)


def test_gradients_pass_through_the_state():
    module, _ = build()
    a, b = draw(1, 7, 11).requires_grad_(), draw(1, 7, 11).requires_grad_()
    cache = hl.Cache()
    torch.cat([module(a[:, :4], cache=cache), module(a[:, 4:], cache=cache)], 1).pow(2).sum().backward()
    module(b).pow(2).sum().backward()
    assert_close(a.grad, b.grad, "gradient", 1e-10)


def test_a_document_that_was_left_is_refused_with_a_cache_only():
    module, _ = build()
    x, cache = draw(1, 6, 11), hl.Cache()
    module(x, documents=torch.tensor([[0, 1, 0, 1, 0, 1]]))
    with pytest.raises(HeadloomError, match="came back after another one"):
        module(x, documents=torch.tensor([[0, 1, 0, 1, 0, 1]]), cache=cache)
    assert cache.length(0) == 0
    module(x[:, :3], documents=torch.tensor([[0, 0, 4]]), cache=cache)
    with pytest.raises(HeadloomError, match="ids that rise"):
        module(x[:, 3:], documents=torch.tensor([[4, 0, 0]]), cache=cache)


@pytest.mark.parametrize("causal", [True, False])
def test_given_windows_and_pairs_hold_without_a_cache_and_are_refused_after_one(causal, monkeypatch):
    module, s = build(causal=causal)
    x = draw(2, 7, 11)
    for blocks in (1 << 24, 2 * 6 * 7 * 2):
        monkeypatch.setattr(linear, "_BLOCK_ELEMENTS", blocks)
        s.window = 3
        want = oracle.output(dict(module.named_parameters()), x, s)
        assert_close(module(x, mask=hl.Window(3)).detach(), want.detach(), "window", 1e-12)
        distance = torch.arange(7)[:, None] - torch.arange(7)
        pairs = (distance.abs() < 3)[None]
        assert_close(module(x, mask=hl.Dense(pairs)).detach(), want.detach(), "pairs", 1e-12)
    cache = hl.Cache()
    module(x, cache=cache)
    for mask in (hl.Window(3), hl.Dense(torch.ones(1, 7, 14, dtype=torch.bool))):
        with pytest.raises(HeadloomError, match=r"state of constant size.*without a cache"):
            module(x, mask=mask, cache=cache)


@torch.no_grad()
def test_a_half_precision_state_keeps_growing():
    """A sum in bfloat16 stands still after 256 equal terms: the state is float32, as exact as the full pass."""
    module = hl.attention("linear", **{**SIZES, "chunk_size": 64}).to(torch.bfloat16)
    x, cache = draw(1, 1, 11).bfloat16().expand(1, 400, 11), hl.Cache()
    module(x, cache=cache)
    state = cache.held(0).slots["state"]
    assert state.dtype == torch.float32
    one = hl.Cache()
    module(x[:, :1], cache=one)
    assert_close(state, 400 * one.held(0).slots["state"], "state", 1e-5)


def test_counts_are_the_closed_forms():
    """FLOPs are linear in T: per token and head c (K + V + 1) in its chunk, K (V + 1) to read and to add to a state."""
    D, H, G, K, V, c = 48, 6, 2, 8, 5, 16
    sizes = {"hidden_size": D, "num_heads": H, "num_kv_heads": G, "head_dim": K, "value_dim": V, "chunk_size": c}
    for T in (64, 128):
        found = hl.cost("linear", tokens=T, dtype="bfloat16", **sizes)
        assert found.parameters == D * (H * K + G * K + G * V) + H * V * D
        core = T * H * c * (K + V + 1) + T * (G + H) * K * (V + 1)
        assert found.flops_full == found.flops_exact == 2 * (T * found.parameters + core)
        assert found.cache_elements_per_token == found.cache_bytes_per_token == 0
        assert found.cache_constant_elements == G * K * (V + 1) and found.cache_constant_bytes == 4 * G * K * (V + 1)


def test_memory_is_linear():
    """T = 8192, H = 8, forward and backward: one head's products alone would take 256 MiB, all 2 GiB."""
    sizes = {"hidden_size": 256, "num_heads": 8, "head_dim": 32}
    assert training_peak("linear", 8192, **sizes) < 240
    documents = torch.arange(8192)[None] // 700 % 5
    assert training_peak("linear", 8192, {"documents": documents}, **sizes) < 250


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_large_scores_stay_finite(dtype):
    module = hl.attention("linear", **SIZES).to(dtype)
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(2.0)
    x = (draw(2, 6, 11) * 4).to(dtype).requires_grad_()
    call = module._prepare(x)
    assert (call.q.float().relu()[:, :2] @ call.handle.k.float().mT).max() > 1e3
    out = module(x)
    out.float().sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()


def test_maps_give_the_output():
    module, _ = build()
    x = draw(1, 6, 11)
    found = module.maps(x)
    values = module.v_proj(x)[0].view(6, 2, 5)
    heads = torch.einsum("hgts,sgv->thv", found.effective[0], values)
    assert_close(module.o_proj(heads.flatten(1)).detach(), module(x)[0].detach(), "maps", 1e-12)
    cache = hl.Cache()
    module(x, cache=cache)
    with pytest.raises(HeadloomError, match="maps and weights need the whole sequence"):
        module.maps(x, cache=cache)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rope_theta": 10000.0}, ["no rope_theta", "None", "10000"]),
        ({"window": 4}, ["no window", "None", "4"]),
        ({"softcap": 1.0}, ["no softcap", "None"]),
        ({"scale": 1.0}, ["no scale", "None"]),
        ({"dropout": 0.1}, ["no dropout", "0.1"]),
        ({"score": "hard"}, ["no score", "softmax", "hard"]),
        ({"chunk_size": 0}, ["chunk_size", "0"]),
        ({"num_kv_heads": 4}, ["num_kv_heads", "4"]),
    ],
)
def test_bad_options_say_what_is_allowed(options, words):
    with pytest.raises(HeadloomError) as caught:
        hl.attention("linear", **{**SIZES, **options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("name", ["linear", "mha"])
def test_rows_that_stood_apart_may_be_given_one_position(name):
    """Positions by row first, then one for all rows: what a cache knows by row is still asked by row."""
    module = randomise(hl.attention(name, hidden_size=11, num_heads=2, head_dim=4).double())
    x, cache = draw(2, 6, 11), hl.Cache()
    first = torch.stack([torch.arange(3), torch.arange(3) + 4])
    module(x[:, :3], positions=first, cache=cache)
    found = module(x[:, 3:], positions=torch.arange(5, 8), cache=cache)
    second = torch.arange(5, 8).expand(2, 3)
    documents = torch.tensor([[0] * 6, [0] * 3 + [1] * 3])
    want = module(x, positions=torch.cat([first, second], 1), documents=documents)
    assert_close(found.detach(), want[:, 3:].detach(), "positions", 1e-12)
