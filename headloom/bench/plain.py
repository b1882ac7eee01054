"""Straightforward forms of mechanisms, the alternatives that `bench` measures against.

Written from the formulas as a first implementation would be: einsum, whole matrices of scores, a dense mask, no thought
of memory order. Each takes a built attention, whose weights and sizes it reads, and its input: causal, one document,
over base gqa, no dropout. `plain_form(attention)` finds the one for a mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headloom.core.errors import HeadloomError
from headloom.mechanism import Attention


def plain_form(attention: Attention) -> Callable[[Any, Tensor], Tensor]:
    """The straightforward form of a mechanism: call it with the attention and its input.

    Raises: HeadloomError: there is none.
    """
    form = FORMS.get(attention.name)
    if form is None:
        raise HeadloomError(f"{attention.name} has no straightforward form to measure against")
    return form


def scored(q_BHTK: Tensor, k_BHSK: Tensor, v_BHSV: Tensor, window: int | None, rows_per_token: int = 1) -> Tensor:
    """softmax(q k^T / sqrt K + mask) v with the whole matrix of scores and a dense mask."""
    T = q_BHTK.shape[2]
    hidden = torch.ones(T, T, dtype=torch.bool).triu(1)
    if window is not None:
        place = torch.arange(T) // rows_per_token
        hidden = hidden | (place[:, None] - place >= window)
    logits = torch.einsum("bhtk,bhsk->bhts", q_BHTK, k_BHSK) / math.sqrt(q_BHTK.shape[-1])
    return torch.einsum("bhts,bhsv->bhtv", torch.softmax(logits.masked_fill(hidden, -torch.inf), -1), v_BHSV)


def turned(attention: Any, x_BHTK: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout."""
    if attention.rotary is None:
        return x_BHTK
    cos, sin = attention.rotary.tables(positions, x_BHTK.dtype)
    x, rest = x_BHTK[..., : cos.shape[-1]], x_BHTK[..., cos.shape[-1] :]
    x1, x2 = x.chunk(2, -1)
    return torch.cat((x * cos + torch.cat((-x2, x1), -1) * sin, rest), -1)


def projected(attention: Any, x_BTD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, H, T, K), k (B, G, T, K), v (B, G, T, V)."""
    c = attention.config
    widths = {"q": c.head_dim, "k": c.head_dim, "v": c.value_dim}
    q, k, v = (getattr(attention, f"{x}_proj")(x_BTD).unflatten(-1, (-1, w)) for x, w in widths.items())
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def output(attention: Any, out_BHTV: Tensor) -> Tensor:
    return attention.o_proj(out_BHTV.transpose(1, 2).flatten(2))


def mha(attention: Any, x_BTD: Tensor) -> Tensor:
    """Grouped-query attention of any number of groups; with a window, the dense mask."""
    c, places = attention.config, torch.arange(x_BTD.shape[1])
    q, k, v = projected(attention, x_BTD)
    q, k = turned(attention, q, places), turned(attention, k, places)
    k, v = (x.repeat_interleave(c.group, 1) for x in (k, v))
    return output(attention, scored(q, k, v, c.window))


def iha(attention: Any, x_BTD: Tensor) -> Tensor:
    """Mixes by einsum; paired: H P attentions and a mean; interleaved (virtual order): the expanded sequence."""
    c = attention.config
    B, T, _ = x_BTD.shape
    H, P, places = c.num_heads, c.pseudo_heads, torch.arange(T)
    q, k, v = (
        torch.einsum("hpm,bmtk->bhptk", getattr(attention, f"{name}_mix").weight, x)
        for name, x in zip("qkv", projected(attention, x_BTD), strict=True)
    )
    if c.interaction == "paired":
        q, k = turned(attention, q, places), turned(attention, k, places)
        out = scored(q.flatten(1, 2), k.flatten(1, 2), v.flatten(1, 2), c.window)
        return output(attention, out.reshape(B, H, P, T, -1).mean(2))
    if c.order == "token":
        raise HeadloomError("the straightforward form is that of order 'virtual'")
    q, k, v = (x.transpose(2, 3).flatten(2, 3) for x in (q, k, v))  # (B, H, T P, K)
    places = torch.arange(T * P) if c.phase == "virtual" else places.repeat_interleave(P)
    q, k = turned(attention, q, places), turned(attention, k, places)
    out = scored(q, k, v, c.window, P).reshape(B, H, T, P, -1)
    if c.collapse == "mean":
        return output(attention, out.mean(3))
    weight = attention.out_mix.weight
    return output(attention, torch.einsum("hgp,bgtpv->bhtv" if c.collapse == "full" else "hp,bhtpv->bhtv", weight, out))


def sas(attention: Any, x_BTD: Tensor) -> Tensor:
    """Conv1d over (B T, H, K), linears over features, attention on unequal widths, the mean over copies."""
    c = attention.config
    if (c.order, c.aggregate) != ("head_first", "mean"):
        raise HeadloomError("the straightforward form is that of order 'head_first' and aggregate 'mean'")
    B, T, _ = x_BTD.shape
    simulated: list[Any] = []
    for name, x in zip("qkv", projected(attention, x_BTD), strict=True):
        first, second = getattr(attention, f"head_{name}")
        y = first(x.transpose(1, 2).flatten(0, 1))  # channels are heads, positions are features
        y = (y + second(F.relu(y))).unflatten(0, (B, T)).transpose(1, 2)
        if name != "v":
            first, second = getattr(attention, f"feature_{name}")
            y = first(y)
            y = turned(attention, y + second(F.relu(y)), torch.arange(T))
        simulated.append(y)
    out = F.scaled_dot_product_attention(simulated[0], simulated[1], simulated[2], is_causal=True)
    return output(attention, out.unflatten(1, (-1, c.num_heads)).mean(1))


Form = Callable[[Any, Tensor], Tensor]
FORMS: dict[str, Form] = dict(mha=mha, gqa=mha, mqa=mha, iha=iha, sas=sas)  # noqa: C408  # the functions' own names
