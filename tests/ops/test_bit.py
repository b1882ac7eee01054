"""BitLinear: ternary weights, 255 levels of activation, straight-through gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import headloom as hl
from headloom.ops.bit import BitLinear, eight_bit, ternary


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
        assert isinstance(attn.q_proj, BitLinear) and isinstance(attn.o_proj, BitLinear)
        plain.load_state_dict(attn.state_dict())
        x = torch.randn(1, 5, 8)
        assert not torch.allclose(attn(x), plain(x))
        attn(x).sum().backward()
        assert all(p.grad is not None for p in attn.parameters())
