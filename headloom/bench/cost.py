"""Parameters, operations and cache bytes of a mechanism, measured from the module built on the meta device.

FLOPs count two per multiply-add of matrix products and convolutions, forward, for one sequence. "full" counts every
(query, key) pair, "exact" only the visible ones; widths are never padded. Nothing is computed, so any size is instant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headloom.attention import Attention, AttentionConfig, build_from_config, make_config
from headloom.core.errors import HeadloomError
from headloom.ops.scores import flop_convention

STEPS = ("project", "write", "queries", "read", "score", "merge", "output")
_WORDS = {
    "project": "projections of q, k, v",
    "write": "heads of k, v before the cache",
    "queries": "heads of q",
    "read": "heads of k, v after the cache",
    "score": "scores",
    "merge": "merge",
    "output": "output projection",
}


@dataclasses.dataclass(frozen=True)
class Part:
    """One step of the contract: its FLOPs for the sequence, all pairs and visible pairs."""

    step: str
    title: str
    flops_full: int
    flops_exact: int


@dataclasses.dataclass(frozen=True)
class Cost:
    """The cost of one attention layer for a sequence of `tokens` (forward, batch 1).

    simulation_multiply_adds: per token, of one tensor (q) whose heads are simulated; 0 where none are.
    """

    mechanism: str
    config: AttentionConfig
    tokens: int
    parameters: int
    parts: tuple[Part, ...]
    flops_full: int
    flops_exact: int
    cache_elements_per_token: int
    cache_bytes_per_token: int
    simulation_multiply_adds: int

    @property
    def flops_exact_per_token(self) -> float:
        return self.flops_exact / self.tokens

    @property
    def flops_full_per_token(self) -> float:
        return self.flops_full / self.tokens

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the config as its own dict."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **fields,
            "config": self.config.to_dict(),
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "flops_full_per_token": self.flops_full_per_token,
            "flops_exact_per_token": self.flops_exact_per_token,
        }


def cost(name: str, *, tokens: int = 1024, dtype: str = "float32", **options: Any) -> Cost:
    """What the mechanism `name` costs at these sizes.

    >>> sizes = dict(hidden_size=768, num_heads=12)
    >>> cost("mha", tokens=8, **sizes).parameters == 4 * 768 * 768
    True
    >>> published = dict(simulated_heads=36, simulated_width=96, kernel_size=1)
    >>> cost("sas", tokens=8, **sizes, **published).simulation_multiply_adds
    663552
    """
    return config_cost(make_config(name, **options), tokens=tokens, dtype=dtype)


def config_cost(config: AttentionConfig, *, tokens: int = 1024, dtype: str = "float32") -> Cost:
    """What the mechanism of a config costs; `dtype` is the cache's ("float32", "bfloat16", "float16")."""
    if tokens < 1:
        raise HeadloomError(f"tokens must be at least 1, not {tokens}")
    bytes_each = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}.get(dtype)
    if bytes_each is None:
        raise HeadloomError(f"dtype must be float32, bfloat16, float16 or float64, not '{dtype}'")
    with torch.device("meta"):
        attn = build_from_config(config)
    full, exact = count_steps(attn, tokens, "full"), count_steps(attn, tokens, "exact")
    parts = tuple(Part(step, _WORDS[step], full[step], exact[step]) for step in STEPS)
    elements = sum(heads * width for heads, width in attn.cache_slots().values())
    # k's share of write + read is a mirror of q's, so one tensor's simulation is what the queries cost
    return Cost(
        mechanism=attn.name,
        config=config,
        tokens=tokens,
        parameters=sum(p.numel() for p in attn.parameters()),
        parts=parts,
        flops_full=sum(full.values()),
        flops_exact=sum(exact.values()),
        cache_elements_per_token=elements,
        cache_bytes_per_token=elements * bytes_each,
        simulation_multiply_adds=full["queries"] // (2 * tokens),
    )


@torch.no_grad()
def count_steps(attn: Attention, tokens: int, convention: str) -> dict[str, int]:
    """FLOPs of each step of one forward pass on the meta device; they must add up to the whole."""
    counts = dict.fromkeys(STEPS, 0)
    x_BTD = torch.empty(1, tokens, attn.config.hidden_size, device="meta")
    attn.eval()
    with flop_convention(convention), FlopCounterMode(display=False) as whole, _counted(attn, counts):
        attn(x_BTD)
    assert sum(counts.values()) == whole.get_total_flops(), (counts, whole.get_total_flops())
    return counts


@contextmanager
def _counted(attn: Attention, counts: dict[str, int]) -> Iterator[None]:
    """Each step of `attn` under a counter of its own, for the time of the context."""

    def wrap(step: str) -> Any:
        method = getattr(attn, step)

        def counted(*args: Any, **kwargs: Any) -> Any:
            with FlopCounterMode(display=False) as counter:
                out = method(*args, **kwargs)
            counts[step] += counter.get_total_flops()
            return out

        return counted

    for step in STEPS:
        object.__setattr__(attn, step, wrap(step))
    try:
        yield
    finally:
        for step in STEPS:
            object.__delattr__(attn, step)


@torch.no_grad()
def model_flops(model: nn.Module, tokens: int, convention: str = "exact") -> int:
    """Forward FLOPs of a language model on the meta device for one sequence (embeddings count nothing)."""
    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    model.eval()
    with flop_convention(convention), FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=True)  # without a cache transformers reads values to find packed documents
    return counter.get_total_flops()


def model_cost(model: nn.Module, tokens: int = 1024) -> dict[str, int]:
    """Parameters (tied ones once) and forward FLOPs in both conventions of a language model on the meta device."""
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_full": model_flops(model, tokens, "full"),
        "flops_exact": model_flops(model, tokens, "exact"),
    }
