"""Runs a module and its oracle on the same numbers and compares outputs and every gradient."""

import torch
from torch import Tensor, nn

SIDES = ("positions", "padding", "documents")


#: options common to all mechanisms, to be compared with the oracle one at a time
COMMON_OPTIONS = {
    "encoder": {"causal": False},
    "window1": {"window": 1},
    "window2": {"window": 2},
    "encoder_window2": {"causal": False, "window": 2},
    "no_rotary": {"rope_theta": None},
    "rotary2": {"rotary_dim": 2, "rope_theta": 20.0},
    "norm_head": {"qk_norm": "head"},
    "norm_width": {"qk_norm": "width", "norm_eps": 0.2},
    "softcap": {"softcap": 0.7},
    "value_dim": {"value_dim": 5},
    "biases": {"qkv_bias": True, "out_bias": True},
    "scale": {"scale": 0.3},
    "identity": {"score": "identity"},
    "hard": {"score": "hard", "window": 3},
    "bit": {"projection": "bit"},
}


def randomise(module: nn.Module, seed: int = 0, spread: float = 0.6) -> nn.Module:
    """Every parameter random and every one different, so that no identity init hides a fault."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(spread * noise)
    return module


def weights_of(module: nn.Module, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Leaf copies of the parameters by their state-dict names."""
    return {n: p.detach().to(dtype).clone().requires_grad_() for n, p in module.named_parameters()}


def draw(batch: int, tokens: int, width: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, width, generator=generator, dtype=torch.float64)


def sides(kind: str, batch: int = 2, tokens: int = 5) -> dict[str, Tensor]:
    """Named side inputs of a call: padding, documents, positions and their meetings."""
    real = torch.ones(batch, tokens, dtype=torch.bool)
    steps = torch.arange(tokens)
    if kind == "plain":
        return {}
    if kind == "left":
        real[0, :2] = False
        return {"padding": real}
    if kind == "right":
        real[1, -2:] = False
        return {"padding": real}
    if kind == "holes":
        real[0, 1] = False
        real[1] = False
        return {"padding": real}
    if kind == "documents":
        return {"documents": torch.stack([steps // 3, (steps > 0).long()] + [steps // 2] * (batch - 2))}
    if kind == "alternating":
        return {"documents": (steps % 2).expand(batch, tokens)}
    if kind == "offset":
        return {"positions": steps + 7}
    if kind == "restart":
        return {"positions": torch.tensor([0, 1, 0, 0, 1]).expand(batch, tokens)}  # one document of one token
    if kind == "padded_documents":
        real[0, 0] = False
        real[1, 3] = False
        return {"padding": real, "documents": (steps >= 2).long().expand(batch, tokens)}
    if kind == "padded_restart":
        real[0, :1] = False
        places = torch.tensor([[0, 0, 1, 0, 1], [0, 1, 2, 0, 1]])
        return {"padding": real, "positions": places}
    if kind == "documents_win":
        return {
            "positions": torch.where(steps < 3, steps, steps - 3).expand(batch, tokens),
            "documents": (steps >= 2).long().expand(batch, tokens),
        }
    raise KeyError(kind)


def assert_close(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-10) -> None:
    size = max(1.0, float(wanted.abs().max()) if wanted.numel() else 1.0)
    error = float((found - wanted).abs().max()) if wanted.numel() else 0.0
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, oracle {tuple(wanted.shape)}"
    assert torch.isfinite(found).all(), f"{what} is not finite"
    assert error <= tolerance * size, f"{what}: error {error:.3e} at size {size:.3g}"


def assert_rounds(found: Tensor, wanted: Tensor, what: str, terms: int) -> None:
    """The same sums of `terms` products, added in whatever order: products of other shapes, or of tensors that lie
    elsewhere in memory, round differently from processor to processor, each time by half an eps of what is summed."""
    assert found.dtype == wanted.dtype, f"{what}: {found.dtype}, wanted {wanted.dtype}"
    assert_close(found.detach(), wanted.detach(), what, 2 * terms * torch.finfo(wanted.dtype).eps)


def assert_matches(module, oracle, s, x_BTD: Tensor, tolerance: float = 1e-10, **side: Tensor) -> None:
    """Output, gradient of the input and of every parameter, under one random cotangent."""
    ours = x_BTD.clone().requires_grad_()
    theirs = x_BTD.clone().requires_grad_()
    weights = weights_of(module)
    out = module(ours, **side)
    want = oracle.output(weights, theirs, s, **side)
    assert_close(out.detach(), want.detach(), "output", tolerance)
    cotangent = draw(*want.shape, seed=5)
    names = list(weights)
    parameters = dict(module.named_parameters())
    found = torch.autograd.grad(out, [ours, *(parameters[n] for n in names)], cotangent, allow_unused=True)
    wanted = torch.autograd.grad(want, [theirs, *weights.values()], cotangent, allow_unused=True)
    for name, a, b, like in zip(["x", *names], found, wanted, [theirs, *weights.values()], strict=True):
        a = torch.zeros_like(like) if a is None else a
        b = torch.zeros_like(like) if b is None else b
        assert_close(a, b, f"gradient of {name}", tolerance)
