"""What every oracle shares: settings with their own defaults, who sees whom, rotation, one row of attention."""

import importlib
import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

Weights = dict[str, Tensor]


def settings(mechanism: str, **options: Any) -> SimpleNamespace:
    """The named options with their defaults filled in, independently of the package's configs."""
    s = SimpleNamespace(
        head_dim=None, num_kv_heads=None, value_dim=None, causal=True, window=None, qk_norm=None, norm_eps=1e-6,
        rope_theta=10000.0, rotary_dim=None, softcap=None, projection="linear", score="softmax", scale=None,
        inv_freq=None, rope_factor=1.0, by_log_sum=False, base=None, q_rank=None, latent_dim=None, plain_dim=None,
        k_rank=None, v_rank=None, kv_only=False,
    )  # fmt: skip
    if mechanism == "iha":
        vars(s).update(pseudo_heads=None, interaction="interleaved", order="virtual", phase="virtual", collapse="full")
    if mechanism == "sas":
        vars(s).update(simulated_heads=None, simulated_width=None, kernel_size=5, order="head_first", aggregate="mean")
    vars(s).update(options)
    heads = s.num_heads
    if s.head_dim is None:
        s.head_dim = s.hidden_size // heads
    if s.value_dim is None:
        s.value_dim = s.head_dim
    if s.base is None:
        s.base = mechanism if mechanism in ("mla", "tpa") else "gqa"
    s.query_dim = s.head_dim
    if s.base == "mla":
        s.rotary_dim = s.rotary_dim or 2 * math.ceil(s.head_dim / 4)
        s.plain_dim = s.plain_dim or s.head_dim
        s.latent_dim = s.latent_dim or min(s.hidden_size, 4 * s.head_dim)
        s.query_dim = s.rotary_dim + s.plain_dim
    if s.base == "tpa":
        s.q_rank = s.q_rank or min(6, heads, s.head_dim)
        s.k_rank, s.v_rank = (s.k_rank or min(2, heads, s.head_dim)), (s.v_rank or min(2, heads, s.value_dim))
    if s.num_kv_heads is None:
        s.num_kv_heads = {"gqa": max(1, heads // 4), "mqa": 1}.get(mechanism, heads)
    if s.inv_freq is None and s.rope_theta is not None:
        width = s.rotary_dim if s.rotary_dim is not None else s.head_dim
        s.inv_freq = [s.rope_theta ** (-2.0 * i / width) for i in range(width // 2)]
    if mechanism == "iha" and s.pseudo_heads is None:
        s.pseudo_heads = heads
    if mechanism == "sas":
        if s.simulated_heads is None:
            s.simulated_heads = 3 * heads
        if s.simulated_width is None:
            s.simulated_width = 2 * math.ceil(1.25 * s.query_dim / 2)
    return s


def visible(
    q_index: int, k_index: int, q_doc: int, k_doc: int, q_real: bool, k_real: bool, causal: bool, window: int | None
) -> bool:
    """Whether a query at row index `q_index` sees the key at `k_index`: real, one document, order, window."""
    if not (q_real and k_real) or q_doc != k_doc:
        return False
    if causal and k_index > q_index:
        return False
    return window is None or abs(q_index - k_index) < window


class Row:
    """One batch row's positions, documents and real tokens; `sees(i, j)` defines who sees whom."""

    def __init__(self, tokens: int, s: SimpleNamespace, positions=None, padding=None, documents=None) -> None:
        self.s = s
        self.tokens = tokens
        self.positions = list(range(tokens)) if positions is None else [int(p) for p in positions]
        self.real = [True] * tokens if padding is None else [bool(r) for r in padding]
        if documents is not None:
            self.documents = [int(d) for d in documents]
        else:
            self.documents, current, last = [], 0, None
            for position, real in zip(self.positions, self.real, strict=True):
                if real:
                    if last is not None and position <= last:
                        current += 1
                    last = position
                self.documents.append(current)

    def sees(self, i: int, j: int) -> bool:
        return visible(
            i, j, self.documents[i], self.documents[j], self.real[i], self.real[j], self.s.causal, self.s.window
        )


def linear(w: Weights, name: str, x: Tensor, projection: str = "linear") -> Tensor:
    """W x + b for one token's vector; with projection="bit" the ternary weight on the 8-bit vector."""
    weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
    if projection == "bit":
        size = max(float(weight.detach().abs().mean()), 1e-5)
        ternary = size * (weight.detach() / size).round().clamp(-1, 1)
        weight = weight + (ternary - weight).detach()
        top = float(x.detach().abs().max())
        if top > 0:
            x = x + ((127 * x.detach() / top).round() * top / 127 - x).detach()
    out = (weight * x).sum(1)
    return out if bias is None else out + bias


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x * x).mean() + eps) * weight


def rotate(x: Tensor, position: float, inv_freq: list[float] | None, factor: float = 1.0) -> Tensor:
    """Half-split rotary turn of the first 2 * len(inv_freq) features by position * inv_freq."""
    if inv_freq is None:
        return x
    half = len(inv_freq)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32  # a table's type
    out = list(x)
    for i, frequency in enumerate(inv_freq):
        angle = torch.tensor(frequency, dtype=wide) * position
        cos, sin = (factor * torch.cos(angle)).to(x.dtype), (factor * torch.sin(angle)).to(x.dtype)
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return torch.stack(out)


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], s: SimpleNamespace, scale: float, width: int) -> Tensor:
    """One query over the keys it sees; no key at all gives exactly zero."""
    if not keys:
        return torch.zeros(width, dtype=q.dtype)
    weights = row_weights(q, keys, s, scale)
    total = weights[0] * values[0]
    for weight, value in zip(weights[1:], values[1:], strict=True):
        total = total + weight * value
    return total


def row_weights(q: Tensor, keys: list[Tensor], s: SimpleNamespace, scale: float) -> Tensor:
    logits = torch.stack([(q * k).sum() * scale for k in keys])
    if s.softcap is not None:
        logits = s.softcap * torch.tanh(logits / s.softcap)
    if s.score == "identity":
        return logits
    if s.score == "hard":
        best = (logits == logits.max()).to(logits.dtype)
        return best / best.sum()
    if s.by_log_sum:  # as kernels that never hold a row do it: other roundings, the same weights
        return torch.exp(logits - torch.logsumexp(logits, 0))
    exps = torch.exp(logits - logits.detach().max())
    return exps / exps.sum()


def base_heads(w: Weights, x: Tensor, s: SimpleNamespace) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """One token's q (H of K), k (G of K), v (G of V): projected and normed, not rotated."""
    if s.base in ("mla", "tpa"):
        return importlib.import_module(f"oracles.{s.base}").heads(w, x, s)
    out = []
    for name, heads, width in (
        ("q", s.num_heads, s.head_dim),
        ("k", s.num_kv_heads, s.head_dim),
        ("v", s.num_kv_heads, s.value_dim),
    ):
        flat = linear(w, f"{name}_proj", x, s.projection)
        normed = name != "v" and s.qk_norm is not None
        if normed and s.qk_norm == "width":
            flat = rms_norm(flat, w[f"{name}_norm.weight"], s.norm_eps)
        parts = [flat[h * width : (h + 1) * width] for h in range(heads)]
        if normed and s.qk_norm == "head":
            parts = [rms_norm(part, w[f"{name}_norm.weight"], s.norm_eps) for part in parts]
        out.append(parts)
    return out[0], out[1], out[2]


def over_batch(one_row, w: Weights, x_BTD: Tensor, s: SimpleNamespace, positions, padding, documents) -> Tensor:
    """Runs `one_row(w, x_TD, s, row)` on every batch row; `positions` may be (T,) or (B, T)."""
    rows = []
    for b in range(x_BTD.shape[0]):
        pick = [
            None if side is None else (side[b] if side.dim() == 2 else side) for side in (positions, padding, documents)
        ]
        rows.append(one_row(w, x_BTD[b], s, Row(x_BTD.shape[1], s, *pick)))
    return torch.stack(rows)
