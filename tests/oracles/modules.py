"""Building modules for tests: random weights of one seed, moderate sizes, and who really influences whom."""

from typing import Any

import torch
from torch import Tensor, nn

from oracles.compare import randomise


def module_of(
    spec: tuple[str, Any], dtype: torch.dtype = torch.float64, seed: int = 0, spread: float = 0.4
) -> nn.Module:
    """The module of (name, config), every parameter random, in eval mode."""
    import headloom as hl

    name, config = spec
    return randomise(hl.attention(name, **config.to_dict()).to(dtype), seed, spread).eval()


def training_peak(name: str, tokens: int, call: dict[str, Any] | None = None, **options: Any) -> float:
    """MiB that a forward and backward pass over so many tokens allocates at most, counted exactly."""
    import headloom as hl
    from headloom.bench.memory import peak_bytes

    module = hl.attention(name, **options)
    x = torch.randn(1, tokens, options["hidden_size"], requires_grad=True)
    peak = peak_bytes(lambda: module(x, **(call or {})).square().mean().backward()) / 2**20
    assert x.grad is not None and x.grad.isfinite().all()
    return peak


def influence(module: nn.Module, x_BTD: Tensor, **call: Any) -> Tensor:
    """(B, T, T) bool: entry (b, t, n) is whether output t of row b moves with token n."""
    x = x_BTD.clone().requires_grad_()
    out = module(x, **call)
    cotangent = torch.randn(x.shape[-1], generator=torch.Generator().manual_seed(9), dtype=x.dtype)
    rows = []
    for t in range(x.shape[1]):
        (gradient,) = torch.autograd.grad(
            out[:, t] @ cotangent, x, torch.ones(x.shape[0], dtype=x.dtype), retain_graph=True
        )
        rows.append(gradient.abs().amax(-1) > 0)
    return torch.stack(rows, dim=1)
