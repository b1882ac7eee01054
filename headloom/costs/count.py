"""Parameters, operations and cache bytes of a mechanism, measured from the module built on the meta device.

FLOPs count two per multiply-add of matrix products and convolutions, forward, for one sequence. "full" counts every
(query, key) pair, "exact" only the visible ones; widths are never padded. Nothing is computed, so any size is instant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from headloom.core.errors import HeadloomError
from headloom.mechanism import Attention, AttentionConfig, build_from_config, layer_config, make_config
from headloom.mechanism.schedules import whole
from headloom.ops.bit import BitLinear, pack_bits, weight_bytes, weight_count
from headloom.ops.scores import flop_convention

STEPS = ("project", "write", "remember", "queries", "read", "expand", "score", "merge", "output")
CORE = ("remember", "score")
"""The steps in which tokens meet."""
_WORDS = {
    "project": "projections of q, k, v",
    "write": "heads of k, v before the cache",
    "remember": "what depends on earlier tokens",
    "queries": "heads of q",
    "read": "heads of k, v after the cache",
    "expand": "keys and values for the scores",
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


@dataclasses.dataclass(frozen=True, repr=False)
class Cost:
    """The cost of one attention layer for a sequence of `tokens` (forward, batch 1).

    cache_constant_elements, cache_constant_bytes: of one sequence, however long; float32 at least.
    simulation_multiply_adds: per token, of one tensor (q) whose heads are simulated; 0 where none are.
    parameters: numbers learned. parameter_bytes: what they take as built in the cost's type (mixes stay float32);
    parameter_bytes_packed: what they take once `hl.pack_bits` has packed what it can, equal where that is nothing.
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
    cache_constant_elements: int
    cache_constant_bytes: int
    simulation_multiply_adds: int
    parameter_bytes: int
    parameter_bytes_packed: int

    @property
    def cache_bytes(self) -> int:
        """Of the whole sequence, without what a window no longer sees."""
        held = min(self.config.window or self.tokens, self.tokens)
        return self.cache_bytes_per_token * held + self.cache_constant_bytes

    @property
    def core_flops_full(self) -> int:
        """FLOPs between tokens, all pairs: the scores, and what depends on earlier tokens."""
        return sum(part.flops_full for part in self.parts if part.step in CORE)

    @property
    def core_flops_exact(self) -> int:
        """The same, visible pairs."""
        return sum(part.flops_exact for part in self.parts if part.step in CORE)

    @property
    def core_flops_rectangle(self) -> float:
        """The same, a full rectangle of all queries by the keys of a window (or all): how the papers count."""
        return self.core_flops_full * min(self.config.window or self.tokens, self.tokens) / self.tokens

    @property
    def core_flops_causal(self) -> float:
        """The same, visible pairs of tokens at the whole price (pseudo-tokens may see less of their own token)."""
        T, W = self.tokens, min(self.config.window or self.tokens, self.tokens)
        below = W * (W + 1) // 2 + (T - W) * W
        return self.core_flops_full * (below if self.config.causal else 2 * below - T) / T**2

    @property
    def flops_exact_per_token(self) -> float:
        return self.flops_exact / self.tokens

    @property
    def flops_full_per_token(self) -> float:
        return self.flops_full / self.tokens

    def __repr__(self) -> str:
        return (
            f"Cost({self.mechanism}, {self.tokens:,} tokens: {self.parameters:,} parameters, {self.flops_exact:,} "
            f"forward FLOPs of visible pairs, {self.cache_bytes_per_token:,} cache bytes a token)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values; the config as its own dict."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **fields,
            "config": self.config.to_dict(),
            "parts": [dataclasses.asdict(part) for part in self.parts],
            "flops_full_per_token": self.flops_full_per_token,
            "flops_exact_per_token": self.flops_exact_per_token,
            "cache_bytes": self.cache_bytes,
            "core_flops_full": self.core_flops_full,
            "core_flops_exact": self.core_flops_exact,
            "core_flops_rectangle": self.core_flops_rectangle,
            "core_flops_causal": self.core_flops_causal,
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
    """What the mechanism of a config costs; `dtype` is the cache's and the weights' ("float32", "bfloat16", ...)."""
    whole("tokens", tokens)
    bytes_each = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}.get(dtype)
    if bytes_each is None:
        raise HeadloomError(f"dtype must be float32, bfloat16, float16 or float64, not '{dtype}'")
    with torch.device("meta"):
        attn = build_from_config(config)
    full, exact = count_steps(attn, tokens, "full"), count_steps(attn, tokens, "exact")
    parts = tuple(Part(step, _WORDS[step], full[step], exact[step]) for step in STEPS)
    elements = sum(heads * width for heads, width in attn.cache_slots().values())
    constant = sum(heads * rows * width for heads, rows, width in attn.constant_slots().values())
    # k's share of write + read is a mirror of q's, so one tensor's simulation is what the queries cost
    return Cost(
        mechanism=attn.name,
        config=config,
        tokens=tokens,
        parameters=weight_count(attn),
        parts=parts,
        flops_full=sum(full.values()),
        flops_exact=sum(exact.values()),
        cache_elements_per_token=elements,
        cache_bytes_per_token=elements * bytes_each,
        cache_constant_elements=constant,
        cache_constant_bytes=constant * max(4, bytes_each),
        simulation_multiply_adds=full["queries"] // (2 * tokens),
        parameter_bytes=weight_bytes(attn.to(getattr(torch, dtype))),
        parameter_bytes_packed=packed_bytes(attn),
    )


def layer_costs(
    specs: Sequence[tuple[str, Mapping[str, Any]]], *, tokens: int = 1024, dtype: str = "float32", **shared: Any
) -> list[Cost]:
    """The cost of every layer of a model: (mechanism, options) each, over the sizes they share."""
    known: dict[str, Cost] = {}
    for name, options in specs:
        if repr((name, options)) not in known:
            config = layer_config(name, shared, options)
            known[repr((name, options))] = config_cost(config, tokens=tokens, dtype=dtype)
    return [known[repr((name, options))] for name, options in specs]


def packed_bytes(module: nn.Module) -> int:
    """Bytes of a module's weights once packed; it packs the module."""
    if any(isinstance(part, BitLinear) for part in module.modules()):
        pack_bits(module)
    return weight_bytes(module)


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
            before = sum(counts.values())
            with FlopCounterMode(display=False) as counter:
                out = method(*args, **kwargs)
            within = sum(counts.values()) - before  # of steps that this one takes, already counted
            counts[step] += counter.get_total_flops() - within
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


def model_cost(model: nn.Module, tokens: int = 1024, dtype: str = "float32") -> dict[str, int]:
    """Of a language model on the meta device: parameters (tied ones once), their bytes in `dtype` as built and packed
    (the model is cast, and packed where it can be), and forward FLOPs in both conventions."""
    parameters = weight_count(model)
    flops = {f"flops_{convention}": model_flops(model, tokens, convention) for convention in ("full", "exact")}
    plain = weight_bytes(model.to(getattr(torch, dtype)))
    return {
        "parameters": parameters,
        **flops,
        "parameter_bytes": plain,
        "parameter_bytes_packed": packed_bytes(model),
    }
