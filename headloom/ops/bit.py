"""BitLinear (Ma et al. 2024, arXiv:2402.17764): ternary weights, 8-bit activations; to train, and packed for inference.

W_q = s clip(round(W / s), -1, 1) with s = mean |W| (at least 1e-5) per matrix; x_q = round(127 x / m) m / 127 with
m = max |x| per token, halves rounded to the even level. Gradients pass straight through. No norm inside (ours: the
authors put an RMSNorm before); the bias is not quantised.

The product is done on the levels, whole numbers from -127 to 127, and the ternary digits, and multiplied by m s / 127
afterwards: a sum of whole numbers is exact in any order. So a token's output does not depend on how many tokens are
projected with it, and equal inputs give a cached and a full pass the same queries, keys and values, bit for bit.

The limit: rounding is a step. The output projection reads the result of attention, which a cached and a full pass add
up in different orders, so that it may differ in its last bit. Where 127 x / m then lies on two sides of a half, the two
passes take neighbouring levels, and an output of that token differs by m s / 127, far more than by rounding elsewhere
(about 1 token in 1,000 in float32).

`PackedBitLinear` keeps what is left of W once it is trained: the ternary matrix in base 3, five weights a byte (3^5 is
243; 1.6 bits a weight, where log2 3 = 1.58 is the least), and s. A forward pass unpacks one matrix at a time into the
scale's type and does the product that `BitLinear` does, on the same numbers: outputs are equal bit for bit. It saves
memory, not time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headloom.core.errors import HeadloomError, need_module

PER_BYTE = 5
ZEROS = 121  # five digits 1, the weight 0


def absmean(weight: Tensor) -> Tensor:
    """The scale s of a matrix."""
    return weight.abs().mean().clamp(min=1e-5)


def digits(weight: Tensor, scale: Tensor) -> Tensor:
    """-1, 0 or 1 for each weight, in its type."""
    return (weight / scale).round().clamp(-1, 1)


def ternary(weight: Tensor) -> Tensor:
    """The ternary matrix that stands for `weight`: values -s, 0, s."""
    scale = absmean(weight)
    return scale * digits(weight, scale)


def eight_bit(x: Tensor) -> Tensor:
    """x rounded to 255 levels of its largest magnitude m along the last axis: level * m / 127.

    >>> eight_bit(torch.tensor([127.0, 63.5, -1.4])).tolist()
    [127.0, 64.0, -1.0]
    """
    largest = magnitude(x)
    return levels(x, largest) * (largest / 127)


def magnitude(x: Tensor) -> Tensor:
    """m = max |x| along the last axis, 1 where all is zero."""
    largest = x.abs().amax(-1, keepdim=True)
    return torch.where(largest > 0, largest, 1)


def levels(x: Tensor, largest: Tensor) -> Tensor:
    """round(127 x / m), halves to even, as if the quotient were known exactly: whole numbers in x's type.

    In a type twice as wide 127 x is exact, and a quotient that is not a half cannot be rounded to one. Nothing is
    wider than float64: there twice the quotient is rounded first, and where that is odd (a half is near) the sign of
    254 |x| - odd m decides. It is exact because x and m are cut in two, and the multipliers are below 2^8.
    """
    if x.dtype != torch.float64:
        wide = torch.float64 if x.dtype == torch.float32 else torch.float32
        return (x.to(wide) * (127 / 128) / largest.to(wide) * 128).round().to(x.dtype)
    size = x.abs()
    twice = (size / largest * 254).round()
    (high, low), (m_high, m_low) = _halves(size), _halves(largest)
    odd = twice / 256
    above = (254 / 256 * high - odd * m_high) + (254 / 256 * low - odd * m_low)
    below = ((twice - 1) / 2).floor()
    up = (above > 0) | ((above == 0) & (below % 2 == 1))
    return torch.where(twice % 2 == 1, below + up, twice / 2) * x.sign()


def _halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """The first 26 and the last 27 bits of float64 numbers, whose sum they are."""
    high = (x.view(torch.int64) >> 27 << 27).view(torch.float64)
    return high, x - high


def straight_through(value: Tensor, source: Tensor) -> Tensor:
    """Exactly `value`, with the gradient of `source`: source - source is 0, while source + (value - source) rounds."""
    return value.detach() + (source - source.detach())


def product(x: Tensor, digit: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """The quantised x times a ternary matrix of digits and its scale; x's gradient passes straight through.

    Levels stand in 128ths, so that no sum is too large for float16.
    """
    largest = magnitude(x.detach())
    level = straight_through(levels(x.detach(), largest) / 128, x * (127 / 128) / largest)
    out = F.linear(level, digit) * (largest * (scale * (128 / 127)))
    return out if bias is None else out + bias


def pack(digit: Tensor) -> Tensor:
    """Digits -1, 0, 1 of any shape -> bytes, five a byte in base 3, the first in the lowest place.

    >>> pack(torch.tensor([1, 0, -1, 1, 1, -1])).tolist()
    [221, 120]
    """
    flat = digit.flatten().to(torch.int32) + 1
    flat = F.pad(flat, (0, -flat.numel() % PER_BYTE), value=1).view(-1, PER_BYTE)
    return (flat * _places(flat.device)).sum(1).to(torch.uint8)


def unpack(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack`, as int8."""
    digit = (packed.to(torch.int32)[:, None] // _places(packed.device) % 3 - 1).to(torch.int8)
    return digit.flatten()[: math.prod(shape)].view(shape)


def _places(device: torch.device) -> Tensor:
    return torch.tensor([3**i for i in range(PER_BYTE)], dtype=torch.int32, device=device)


class BitLinear(nn.Linear):
    """`nn.Linear` whose product is done by quantised weights and inputs; drop-in, same parameters."""

    def forward(self, x: Tensor) -> Tensor:
        scale = absmean(self.weight.detach())
        digit = straight_through(digits(self.weight.detach(), scale), self.weight / scale)
        return product(x, digit, scale, self.bias)


class PackedBitLinear(nn.Module):
    """A trained `BitLinear`, packed: buffers `packed` (uint8), `scale` and `bias`. It cannot be trained.

    A fresh one is all zeros: pack a trained one with `of`, or load a state dict.
    """

    packed: Tensor
    scale: Tensor
    bias: Tensor | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        room = -(-in_features * out_features // PER_BYTE)
        self.register_buffer("packed", torch.full((room,), ZEROS, dtype=torch.uint8))
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.training = False

    @classmethod
    @torch.no_grad()
    def of(cls, linear: BitLinear) -> PackedBitLinear:
        """The packed form of `linear`, on its device and in its type."""
        weight = linear.weight
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, bias=linear.bias is not None)
        made.scale = absmean(weight)
        made.packed = pack(digits(weight, made.scale))
        made.bias = None if linear.bias is None else linear.bias.detach().clone()
        return made

    @property
    def weight(self) -> Tensor:
        """The ternary matrix, unpacked: what `ternary` made of the trained one."""
        return self.scale * self.digits

    @property
    def digits(self) -> Tensor:
        """-1, 0 or 1 for each weight, in the scale's type."""
        return unpack(self.packed, (self.out_features, self.in_features)).to(self.scale.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.digits, self.scale, self.bias)

    def train(self, mode: bool = True) -> PackedBitLinear:
        if mode:
            raise HeadloomError(
                "packed ternary weights cannot be trained: train with projection 'bit', then pack with hl.pack_bits"
            )
        return super().train(False)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def pack_bits(module: nn.Module) -> nn.Module:
    """Pack every `BitLinear` of an attention or a model for inference, in place, and put it into evaluation mode.

    The output stays the same bit for bit; weights take 1.6 bits each. What was packed can be saved and loaded (its
    configs then say projection "packed") and cannot be trained.

    Raises:
        HeadloomError: there is nothing to pack.
    """
    need_module(module)
    found = [(path, part) for path, part in module.named_modules() if isinstance(part, BitLinear)]
    if not found:
        raise HeadloomError(
            f"this {type(module).__name__} has no BitLinear to pack: build it with projection='bit', train, then pack"
        )
    if found[0][0] == "":
        return PackedBitLinear.of(found[0][1])
    for path, linear in found:
        parent, _, name = path.rpartition(".")
        setattr(module.get_submodule(parent), name, PackedBitLinear.of(linear))
    for part in reversed(list(module.modules())):  # an attention before the model that holds it
        told: Any = getattr(part, "bits_were_packed", None)
        if told is not None and any(isinstance(inner, PackedBitLinear) for inner in part.modules()):
            told()
    return module.eval()


def weight_count(module: nn.Module) -> int:
    """Numbers a module has learned: its parameters (tied ones once), and the weights and biases that are packed."""
    packed = [part for part in module.modules() if isinstance(part, PackedBitLinear)]
    inside = sum(p.in_features * p.out_features + (0 if p.bias is None else p.bias.numel()) for p in packed)
    return sum(p.numel() for p in module.parameters()) + inside


def weight_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters and saved buffers as they are (tied ones once)."""
    saved = {id(x): x for x in module.state_dict(keep_vars=True).values() if isinstance(x, Tensor)}
    return sum(x.numel() * x.element_size() for x in saved.values())
