"""BitLinear: ternary weights, 255 levels of activation, straight-through gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import headloom as hl
from headloom.ops.bit import (
    BitLinear,
    PackedBitLinear,
    eight_bit,
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
    """W + (W_q - W) would round where a weight is far from its ternary value."""
    layer, x = BitLinear(301, 203), torch.randn(7, 301)
    torch.nn.init.normal_(layer.weight, std=0.05)
    torch.nn.init.normal_(layer.weight[0], std=1000.0)
    assert torch.equal(layer(x), F.linear(eight_bit(x), ternary(layer.weight) + 0, layer.bias))
    assert not torch.equal(layer.weight + (ternary(layer.weight) - layer.weight), ternary(layer.weight))


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
    attn = hl.attention.build_from_config(config).eval()
    x = torch.randn(2, 5, config.hidden_size)
    before, count, size = attn(x), weight_count(attn), weight_bytes(attn)
    assert hl.pack_bits(attn) is attn and attn.config == config.replace(projection="packed")
    assert torch.equal(attn(x), before)
    assert weight_count(attn) == count and weight_bytes(attn) < size
    fresh = hl.attention.build_from_config(attn.config)
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
    assert torch.equal(back(ids).logits, before)
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, do_sample=False), back.generate(ids, max_new_tokens=4, do_sample=False)
    )
