"""Linear attention (Transformers are RNNs, Katharopoulos 2020). arXiv:2006.16236.

No softmax: the score of a query and a key is the product of their features, so that the sum over keys can be taken once
for all queries. With phi(x) = elu(x) + 1 > 0, per head:

    o_i = phi(q_i) S_i / (phi(q_i) z_i + 1e-6)      S_i = sum_j phi(k_j)^T v_j  (K, V),   z_i = sum_j phi(k_j)^T  (K, 1)

over the visible j (paper; query head h reads kv head h // (H/G), ours). There is no scale, and rotary and windows are
refused: phi of a turned vector is no function of a distance, and a sum forgets nothing. Refused too: soft-cap, dropout
on weights, other scores. A row that sees nothing is 0.

A full pass goes in chunks of `chunk_size` tokens (`headloom.ops.linear`), memory and FLOPs linear in T, whatever the
documents and padding. A given mask over pairs or a window, which no sum can follow, is served by blocks of materialised
products, and refused after a cache. Generation keeps S and z of the last document instead of its tokens: [S, z] as one
tensor (B, G, K, V + 1), float32 at least whatever the model's type (a bfloat16 sum stops growing after some 256 tokens:
ours). Documents must then follow one another with rising ids: one that was left is forgotten.

Parameters as gqa. FLOPs O(T). Cache per token 0; a constant G K (V + 1).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from headloom.contract.attention import Attention
from headloom.contract.common import need
from headloom.contract.config import AttentionConfig
from headloom.contract.handles import Whole
from headloom.core.errors import HeadloomError
from headloom.ops import linear
from headloom.ops.cache import Cache, Seen
from headloom.ops.masks import Visibility
from headloom.ops.mixing import own_width
from headloom.ops.scores import record

EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearConfig(AttentionConfig):
    """As `AttentionConfig`, and what follows.

    rope_theta, window, softcap, scale, dropout and score have only the values that mean nothing.
    """

    chunk_size: Annotated[int, "tokens computed together; it changes time and memory, not the result"] = 64
    rope_theta: float | None = None

    without: ClassVar[tuple[str, ...]] = ("rope_theta", "rotary_dim", "rope_scaling")

    def __post_init__(self) -> None:
        refused = {"rope_theta": None, "window": None, "softcap": None, "scale": None, "score": "softmax", "dropout": 0}
        for name, only in refused.items():
            value = getattr(self, name)
            need(value == only, f"linear attention has no {name}: it must be {only}, not {value}; leave it out")
        super().__post_init__()
        need(self.chunk_size >= 1, f"chunk_size must be at least 1, not {self.chunk_size}")

    @property
    def exact(self) -> bool:
        return False

    @classmethod
    def tiny(cls, **changes: Any) -> Self:
        return super().tiny(**{"chunk_size": 2, **changes})


class Linear(Attention[LinearConfig]):
    """Linear attention: a sum of outer products of features of keys, and values."""

    name = "linear"
    title = "Linear attention"
    paper = "arXiv:2006.16236"
    summary = "no softmax: features of keys summed up, a constant state in generation"
    config_cls = LinearConfig

    row_slack = 1e-5

    def cache_slots(self) -> dict[str, tuple[int, int]]:
        return {}

    def constant_slots(self) -> dict[str, tuple[int, int, int]]:
        c = self.config
        return {"state": (c.num_kv_heads, c.query_dim, c.value_dim + 1)}

    # Steps -------------------------------------------------------------------------------------------------------

    def write(self, slots: dict[str, Tensor], positions_BT: Tensor) -> dict[str, Tensor]:
        """phi(k), and v with a column of ones, whose sum is the denominator."""
        k, v = self.base.expand(self, slots)
        wide = torch.promote_types(v.dtype, torch.float32)
        return {"k": _features(k), "v": F.pad(v.to(wide), (0, 1), value=1.0)}

    def remember(self, new: Seen, cache: Cache | None, update: bool, visible: Callable[[Seen], Visibility]) -> Seen:
        """This call's tokens; before them the state, as K tokens of its document: phi(q) meets a unit vector there."""
        if cache is None:
            return new
        layer, held = self.layer_index, cache.held(self.layer_index)
        past, T = cache.length(layer), new.positions_BS.shape[-1]
        if held is not None or new.documents_BS is not None:
            new = dataclasses.replace(new, documents_BS=_documents(new, held))
        if update:
            with own_width(new.slots["v"]):
                cache.replace(layer, self._advance(held, new, past + T))
        if held is None:
            return new
        state = held.slots["state"]
        B, G, K, _ = state.shape
        unit = torch.eye(K, dtype=state.dtype, device=state.device).expand(B, G, K, K)
        slots = {"k": torch.cat((unit, new.slots["k"]), 2), "v": torch.cat((state, new.slots["v"]), 2)}
        documents = None
        if new.documents_BS is not None:
            documents = torch.cat((_document(held, B).expand(B, K), new.documents_BS), 1)
        positions = torch.cat((held.positions_BS.expand(B, K), new.positions_BS.expand(B, T)), 1)
        return Seen(slots, positions, documents, past + T)

    def read(self, seen: Seen, length: int | None) -> Whole:
        return Whole(seen.slots["k"], seen.slots["v"])

    def core(self, q: Tensor, k: Tensor, v: Tensor, visibility: Visibility) -> Tensor:
        record("chunks")
        with own_width(q):
            sums = linear.attend(_features(q), k, v, visibility, self.config.chunk_size)
        return (sums[..., :-1] / (sums[..., -1:] + EPSILON)).to(q.dtype)

    def _advance(self, held: Seen | None, new: Seen, tokens: int) -> Seen:
        """The state after this call's tokens: the sum over the document of a row's last real token."""
        k, v, documents = new.slots["k"], new.slots["v"], new.documents_BS
        B, T = v.shape[0], v.shape[2]
        if documents is None:
            total = k.transpose(-1, -2) @ v
            state = total if held is None else held.slots["state"] + total
            return Seen({"state": state}, new.positions_BS[:, -1:], None, tokens)
        place = torch.where(documents >= 0, torch.arange(T, device=v.device), -1).amax(1, keepdim=True)
        none, place = place < 0, place.clamp(min=0)
        last, position = documents.gather(1, place), new.positions_BS.expand(B, T).gather(1, place)
        before = _document(held, B) if held is not None else last.new_full((B, 1), -1)
        last = torch.where(none, before, last)
        if held is not None:
            position = torch.where(none, held.positions_BS.expand(B, 1), position)
        other = (documents != last)[:, None, :, None]
        state = k.masked_fill(other, 0).transpose(-1, -2) @ v.masked_fill(other, 0)
        if held is not None:
            state = state + torch.where((last == before)[:, :, None, None], held.slots["state"], 0)
        return Seen({"state": state}, position, last, tokens)

    # Around it ---------------------------------------------------------------------------------------------------

    def weights(self, q: Tensor, k: Tensor, visibility: Visibility) -> Tensor:
        """Rows fall short of 1 by 1e-6 of the denominator. A state has no tokens to draw."""
        if visibility.past:
            raise HeadloomError(
                "linear attention's cache holds a sum, not the tokens before: maps and weights need the whole sequence"
            )
        weights = linear.products(_features(q), k, visibility.dense(device=q.device))
        return weights / (weights.sum(-1, keepdim=True) + EPSILON)

    def spread(self, weights: Tensor, v: Tensor) -> Tensor:
        return super().spread(weights, v[..., :-1])


def _features(x: Tensor) -> Tensor:
    """phi(x) = elu(x) + 1 = max(x, 0) + exp(min(x, 0)), in float32 at least; e^x - 1 + 1 would round to 0."""
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return F.relu(x) + x.clamp(max=0).exp()


def _document(held: Seen, batch: int) -> Tensor:
    """The document (B, 1) that a state is of; -1 where a row has seen no real token."""
    if held.documents_BS is None:
        return torch.zeros(batch, 1, dtype=torch.long, device=held.positions_BS.device)
    return held.documents_BS


def _documents(new: Seen, held: Seen | None) -> Tensor | None:
    """This call's documents, or None if there has been one only; refused if one comes that has been left."""
    documents, before = new.documents_BS, None if held is None else held.documents_BS
    B, T = new.slots["v"].shape[0], new.slots["v"].shape[2]
    if documents is None:
        if before is None:
            return None
        documents = torch.zeros(B, T, dtype=torch.long, device=before.device)
    if documents.is_meta or torch.compiler.is_compiling():
        return documents
    start = documents.new_full((B, 1), -1) if held is None else _document(held, B)
    reached = torch.cat((start, documents), 1).cummax(1).values[:, 1:]
    if bool(((documents < reached) & (documents >= 0)).any()):
        raise HeadloomError(
            "a document came back after another one: a cache of constant size keeps the last document's sum only. "
            "Give document ids that rise along a row, or the whole sequence without a cache"
        )
    return documents
