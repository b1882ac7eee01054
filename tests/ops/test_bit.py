"""BitLinear: ternary weights, 255 levels of activation, straight-through gradients."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from oracles.compare import assert_close, assert_rounds

import headloom as hl
from headloom.ops.bit import (
    BitLinear,
    PackedBitLinear,
    absmean,
    digits,
    eight_bit,
    levels,
    magnitude,
    pack,
    pack_bits,
    ternary,
    unpack,
    weight_bytes,
    weight_count,
)


def test_values_by_hand():
    weight = torch.tensor([[0.5, -0.1], [1.5, -0.5]])  # mean |W| = 0.65
    torch.testing.assert_close(ternary(weight), torch.tensor([[0.65, 0.0], [0.65, -0.65]]))
    x = torch.tensor([[127.0, 63.6, -1.4], [0.0, 0.0, 0.0]])
    torch.testing.assert_close(eight_bit(x), torch.tensor([[127.0, 64.0, -1.0], [0.0, 0.0, 0.0]]))


def test_gradients_pass_straight_through():
    layer = BitLinear(5, 3).double()
    x = torch.randn(4, 5, dtype=torch.double, requires_grad=True)
    out = layer(x)
    torch.testing.assert_close(out, F.linear(eight_bit(x), ternary(layer.weight), layer.bias))
    grad = torch.randn_like(out)
    dx, dw = torch.autograd.grad(out, (x, layer.weight), grad)
    torch.testing.assert_close(dx, grad @ ternary(layer.weight))
    torch.testing.assert_close(dw, grad.T @ eight_bit(x))


def test_any_mechanism_takes_it():
    for name in hl.mechanisms():
        attn = hl.attention(name, hidden_size=8, num_heads=4, projection="bit")
        plain = hl.attention(name, hidden_size=8, num_heads=4)
        assert isinstance(attn.o_proj, BitLinear)
        assert sum(isinstance(part, BitLinear) for part in attn.modules()) >= 2
        plain.load_state_dict(attn.state_dict())
        x = torch.randn(1, 5, 8)
        assert not torch.allclose(attn(x), plain(x))
        attn(x).sum().backward()
        assert all(p.grad is not None for p in attn.parameters())


def test_the_forward_value_is_exactly_the_ternary_matrix():
    """W + (W_q - W) would round where a weight is far from its ternary value; a sum of whole numbers rounds nothing."""
    layer, x = BitLinear(301, 203), torch.randn(7, 301)
    torch.nn.init.normal_(layer.weight, std=0.05)
    torch.nn.init.normal_(layer.weight[0], std=1000.0)
    largest, scale = magnitude(x), absmean(layer.weight)
    sums = levels(x, largest).double() @ digits(layer.weight, scale).double().T
    want = sums * (largest.double() * scale.double() / 127)
    room = 4 * torch.finfo(torch.float32).eps * (want.abs() + layer.bias.abs())  # four roundings
    assert ((layer(x) - (want + layer.bias)).abs() <= room).all()
    assert not torch.equal(layer.weight + (ternary(layer.weight) - layer.weight), ternary(layer.weight))


def test_exact_ties_go_to_the_even_level():
    """All 325 a/b below 400 whose 127 a/b is a half: 18 and 9 give round(63.5) = 64."""
    torch.testing.assert_close(eight_bit(torch.tensor([18.0, 9.0])), torch.tensor([18.0, 64 * 18 / 127]))
    pairs = [(a, b) for b in range(1, 400) for a in range(1, b + 1) if Fraction(127 * a, b) % 1 == Fraction(1, 2)]
    assert len(pairs) == 325 and (9, 18) in pairs and (17, 34) in pairs
    want = [round(Fraction(127 * a, b)) for a, b in pairs]
    for dtype in (torch.float64, torch.float32, torch.float16):
        x = torch.tensor([(b, a) for a, b in pairs], dtype=dtype)
        assert levels(x, magnitude(x))[:, 1].tolist() == want
        assert levels(-x, magnitude(x))[:, 1].tolist() == [-level for level in want]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_next_to_a_tie_go_to_the_nearer_level(dtype):
    """The last bit decides, at sizes that would overflow or vanish if squared or multiplied by 254."""
    info = torch.finfo(dtype)
    bits = 1 - round(math.log2(info.eps))
    draw = random.Random(0)
    for size in (info.max, 1.0, info.smallest_normal * 2**8):
        m = torch.tensor([draw.uniform(0.6, 1.0) for _ in range(500)], dtype=torch.double)
        m = (m * 2**bits).floor() / 2**bits * size  # at least bits - 1 bits, and not above the largest number
        half = torch.tensor([draw.randrange(127) + 0.5 for _ in m])
        near = (m * (half / 127)).to(dtype)
        m = m.to(dtype)
        for x in (near, torch.nextafter(near, torch.zeros_like(near)), torch.nextafter(near, m)):
            want = [round(127 * Fraction(a) / Fraction(b)) for a, b in zip(x.tolist(), m.tolist(), strict=True)]
            assert levels(x[:, None], m[:, None])[:, 0].tolist() == want


@pytest.mark.parametrize("name", ["mha", "iha", "mla", "mfa_kr"])
def test_cached_and_full_passes_round_the_same_numbers(name):
    """Keys and values are sums of whole numbers, equal but for the rounding of the rotation; only the output
    projection's input may fall on another level, and then by one, where it lies halfway."""
    config = hl.mechanisms()[name].config_cls.tiny(projection="bit")
    for seed in range(10):
        torch.manual_seed(seed)
        attn = hl.attention(config)
        if name == "mfa_kr":
            torch.nn.init.normal_(attn.alpha.weight)
        read: list[torch.Tensor] = []
        attn.o_proj.register_forward_pre_hook(lambda _, given, read=read: read.append(given[0]))
        x, stepwise, at_once = torch.randn(1, 24, config.hidden_size), hl.Cache(), hl.Cache()
        with torch.no_grad():
            full = attn(x, cache=at_once)
            parts = torch.cat([attn(x[:, i : i + 1], cache=stepwise) for i in range(24)], 1)
        held, again = (cache.layers[0].slots for cache in (at_once, stepwise))
        for slot in held:
            assert_rounds(held[slot], again[slot], slot, terms=4)
        given, largest = torch.cat((read[0], torch.cat(read[1:], 1))), magnitude(read[0])
        level = levels(given, magnitude(given))
        moved = level[0] != level[1]
        assert (level[0] - level[1]).abs().max() <= 1
        exact = 127 * read[0][0] / largest[0]
        torch.testing.assert_close(exact[moved].abs() % 1, torch.full_like(exact[moved], 0.5), rtol=0, atol=1e-3)
        step = largest[0] * absmean(attn.o_proj.weight) / 127
        room = moved.sum(-1, keepdim=True) * step + 1e-5 * full[0].abs().max()
        assert ((full - parts)[0].abs() <= room).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 5), (7, 11)])
def test_five_weights_fit_a_byte(shape):
    every = torch.randint(-1, 2, shape)
    packed = pack(every)
    assert packed.dtype == torch.uint8 and packed.numel() == -(-every.numel() // 5)
    assert torch.equal(unpack(packed, shape).long(), every)


def test_bytes_by_hand():
    """1 0 -1 1 1 stands as 2 1 0 2 2: 2 + 3 + 0 + 54 + 162; a lone -1 as 0 and four zeros: 3 + 9 + 27 + 81."""
    assert pack(torch.tensor([[1, 0, -1], [1, 1, -1]])).tolist() == [2 + 3 + 54 + 162, 3 + 9 + 27 + 81]
    assert unpack(torch.tensor([242, 0, 121], dtype=torch.uint8), (3, 5)).tolist() == [[1] * 5, [-1] * 5, [0] * 5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_packed_equals_trained_bit_for_bit(dtype, bias):
    layer = BitLinear(133, 67, bias=bias).to(dtype)
    with torch.no_grad():
        layer.weight[3] = 0
        layer.weight[4, :5] *= 30
    packed = PackedBitLinear.of(layer)
    assert torch.equal(packed.weight, ternary(layer.weight)) and packed.weight.dtype == dtype
    for x in (torch.randn(2, 9, 133, dtype=dtype), torch.zeros(1, 133, dtype=dtype)):
        assert torch.equal(packed(x), layer(x))
    torch.nn.init.constant_(layer.weight, 2e-6)  # below the least scale, 1e-5: every weight is 0
    assert PackedBitLinear.of(layer).scale == torch.tensor(1e-5, dtype=dtype)
    assert not PackedBitLinear.of(layer).weight.any()
    one = pack_bits(BitLinear(4, 4))
    assert isinstance(one, PackedBitLinear)


def test_gradients_pass_through_a_packed_matrix_to_what_stands_below():
    layer = BitLinear(6, 3).double()
    packed = PackedBitLinear.of(layer)
    x = torch.randn(5, 6, dtype=torch.double, requires_grad=True)
    (dx,) = torch.autograd.grad(packed(x).sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(layer(x).sum(), x)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", list(hl.mechanisms()))
def test_every_mechanism_packs(name):
    config = hl.mechanisms()[name].config_cls.tiny(projection="bit", out_bias=True)
    attn = hl.attention(config).eval()
    x = torch.randn(2, 5, config.hidden_size)
    before, count, size = attn(x), weight_count(attn), weight_bytes(attn)
    assert hl.pack_bits(attn) is attn and attn.config == config.replace(projection="packed")
    assert torch.equal(attn(x), before)
    assert weight_count(attn) == count and weight_bytes(attn) < size
    fresh = hl.attention(attn.config)
    assert not torch.equal(fresh(x), before)
    state = attn.state_dict()
    assert {state[name].dtype for name in state if name.endswith(".packed")} == {torch.uint8}
    fresh.load_state_dict(state)
    assert torch.equal(fresh(x), before)
    with pytest.raises(hl.HeadloomError, match=r"cannot be trained.*hl\.pack_bits"):
        attn.train()


def test_there_must_be_something_to_pack():
    with pytest.raises(hl.HeadloomError, match="no BitLinear to pack: build it with projection='bit'"):
        hl.pack_bits(hl.attention("mha", hidden_size=8, num_heads=2))


def test_a_packed_model_is_saved_and_generates(tmp_path):
    from transformers import AutoModelForCausalLM

    bits = {"projection": "bit"}
    sizes = {"hidden_size": 24, "num_heads": 4, "num_layers": 3, "intermediate_size": 30, "max_positions": 32}
    model = hl.build_model([("iha", {"pseudo_heads": 2, **bits}), ("mha", {}), ("mha", bits)], vocab_size=31, **sizes)
    ids = torch.randint(0, 31, (2, 7))
    before = model.eval()(ids).logits
    hl.pack_bits(model)
    assert torch.equal(model(ids).logits, before)
    kinds = [layer["options"].get("projection", "linear") for layer in model.config.headloom["layers"]]
    assert kinds == ["packed", "linear", "packed"]
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    own, loaded = model.state_dict(), back.state_dict()
    assert own["model.layers.0.self_attn.q_proj.packed"].dtype == torch.uint8
    assert list(own) == list(loaded) and all(torch.equal(own[key], loaded[key]) for key in own)
    # the layer of plain weights may round differently, and where it does a rounding to eight bits may move
    assert_close(back(ids).logits.detach(), before.detach(), "logits", 1e-2)
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False), back.generate(ids, max_new_tokens=4, do_sample=False)
    )
