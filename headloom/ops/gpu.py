"""Softmax attention on a GPU, by PyTorch's own kernels, forward and backward.

    all or plainly causal        scaled_dot_product_attention without a mask       "sdpa"
    few pairs                    the same with a boolean mask                      "sdpa"
    windows, documents, token order, chunks after a cache, soft-capped scores
                                 flex attention over the mask's predicates         "flex"

Flex attention reads the blocks of 128 x 128 rows (a token's one, or its several) that show something and leaves out the
others, so a window costs its window. Float64 keeps the package's own operator (`headloom.ops.scores`): these kernels
do not take it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from headloom.ops.masks import Causal, Mask, Visibility, Window, expand_rows

FEW = 1 << 22  # pairs of a batch up to which a mask is written out: below it, building blocks costs more than it saves
BLOCK = 128  # rows and columns of flex attention's blocks
_ALIGNED = 8  # widths the kernels want a multiple of
_NARROWEST = 16  # width that flex attention needs at least


def takes(q_BHTK: Tensor) -> bool:
    """Whether these kernels take such queries."""
    return q_BHTK.is_cuda and q_BHTK.dtype != torch.float64


def few(q_BHTK: Tensor, k_BGSK: Tensor) -> bool:
    """Whether so few pairs meet that they may be written out."""
    return q_BHTK.shape[0] * q_BHTK.shape[2] * k_BGSK.shape[2] <= FEW


def attend(
    q_BHTK: Tensor,
    k_BGSK: Tensor,
    v_BGSV: Tensor,
    visibility: Visibility,
    scale: float,
    rows_per_token: int,
    rows_causal: bool,
    softcap: float | None = None,
) -> tuple[Tensor, str]:
    """softmax(scale q k^T + mask) v, (B, H, T P, V), and the path taken. Arguments as in `scores.attend`."""
    rows_causal = rows_causal and rows_per_token > 1
    width, value_width = max(q_BHTK.shape[-1], v_BGSV.shape[-1], _NARROWEST), v_BGSV.shape[-1]
    width = -(-width // _ALIGNED) * _ALIGNED
    q, k, v = (F.pad(x, (0, width - x.shape[-1])) for x in (q_BHTK, k_BGSK, v_BGSV))
    group = q.shape[1] // k.shape[1]
    if (
        group & (group - 1) or q.dtype == torch.float32
    ):  # flex groups by powers of two, sdpa's float32 kernel not at all
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    shared: dict[str, Any] = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    everything, causal = _plain(visibility, rows_per_token, rows_causal)
    if softcap is None and (everything or causal):
        out, path = F.scaled_dot_product_attention(q, k, v, is_causal=causal, **shared), "sdpa"
    elif softcap is None and few(q, k):
        dense = visibility.dense(device=q.device)
        visible = expand_rows(dense, visibility.past, rows_per_token, rows_causal).unsqueeze(1)
        sees = visible.any(-1, keepdim=True)  # a row that sees nothing is 0, whatever a kernel makes of it
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible | ~sees, **shared)
        out, path = torch.where(sees, out, 0), "sdpa"
    else:
        block_mask = _block_mask(visibility, q.shape[0], rows_per_token, rows_causal, q.device)
        capped = None if softcap is None else _capped(softcap)
        out, path = _flex(q.device)(q, k, v, score_mod=capped, block_mask=block_mask, **shared), "flex"
    return out[..., :value_width], path


@functools.cache
def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, b, h, row, column: softcap * torch.tanh(score / softcap)


def _plain(visibility: Visibility, rows_per_token: int, rows_causal: bool) -> tuple[bool, bool]:
    """(everything is visible, it is causal from the top left): what needs no mask."""
    T, S = visibility.T, visibility.S
    if visibility.documents_BS is not None or visibility.pairs_BTS is not None:
        return False, False
    if visibility.window is not None and visibility.window < S:
        return False, False
    if not visibility.causal or (T == 1 and not rows_causal):
        return not rows_causal, False
    return False, T == S and (rows_per_token == 1 or rows_causal)


def _flex(device: torch.device) -> Callable[..., Any]:
    """Flex attention as a kernel: compiled, or part of the model's graph where that is being compiled."""
    plain: Any = flex_attention
    return plain if torch.compiler.is_compiling() or device.type == "cpu" else _compiled()


@functools.cache
def _compiled() -> Callable[..., Any]:
    # every new rule compiles anew; always a whole graph, because outside of one all scores would be written out
    compiling: Any = torch.compile
    made: Callable[..., Any] = compiling(flex_attention, fullgraph=True, recompile_limit=256, isolate_recompiles=True)
    return made


def _predicate(visibility: Visibility, rows_per_token: int, rows_causal: bool) -> Callable[..., Tensor]:
    """The visibility as flex attention asks for it: of one pair of rows."""
    past, documents_BS, pairs_BTS = visibility.past, visibility.documents_BS, visibility.pairs_BTS
    rules: list[Mask] = [Causal()] if visibility.causal else []
    if visibility.window is not None:
        rules.append(Window(visibility.window))

    def sequence(b: Tensor, of: Tensor) -> Tensor | int:
        return b if of.shape[0] > 1 else 0  # one row stands for all

    def visible(b: Tensor, h: Tensor, row: Tensor, column: Tensor) -> Tensor:
        own, key = row // rows_per_token, column // rows_per_token
        query = own + past
        out = key >= 0
        for rule in rules:
            out = out & rule.visible(query, key)
        if rows_causal:
            out = out & ((column <= row + past * rows_per_token) | (query != key))
        if documents_BS is not None:
            mine = sequence(b, documents_BS)
            document = documents_BS[mine, query]
            out = out & (document == documents_BS[mine, key]) & (document >= 0)
        if pairs_BTS is not None:
            out = out & pairs_BTS[sequence(b, pairs_BTS), own, key]
        return out

    return visible


def _block_mask(
    visibility: Visibility, batch: int, rows_per_token: int, rows_causal: bool, device: torch.device
) -> BlockMask:
    """Which blocks show something; once for a structure, once for a tensor of documents: all layers share it."""
    rows, columns = visibility.T * rows_per_token, visibility.S * rows_per_token
    data = visibility.documents_BS is not None or visibility.pairs_BTS is not None
    if torch.compiler.is_compiling():
        predicate = _predicate(visibility, rows_per_token, rows_causal)
        return create_block_mask(predicate, batch if data else None, None, rows, columns, device, BLOCK)
    if visibility.pairs_BTS is not None:
        return _built(visibility, rows_per_token, rows_causal, device)
    structure = (visibility.T, visibility.S, visibility.causal, visibility.window, rows_per_token, rows_causal, device)
    documents_BS = visibility.documents_BS
    if documents_BS is None:
        return _of_structure(*structure)
    _latest.only(documents_BS)
    if structure not in _latest.masks:
        _latest.masks[structure] = _built(visibility, rows_per_token, rows_causal, device)
    return _latest.masks[structure]


class _Latest:
    """The block masks of the latest tensor of documents, which all layers of a model share: its masks refer to it."""

    def __init__(self) -> None:
        self.documents_BS: Tensor | None = None
        self.version = -1
        self.masks: dict[tuple[object, ...], BlockMask] = {}

    def only(self, documents_BS: Tensor) -> None:
        if self.documents_BS is not documents_BS or self.version != documents_BS._version:
            self.documents_BS, self.version, self.masks = documents_BS, documents_BS._version, {}


_latest = _Latest()


@functools.lru_cache(maxsize=64)
def _of_structure(
    T: int, S: int, causal: bool, window: int | None, rows_per_token: int, rows_causal: bool, device: torch.device
) -> BlockMask:
    return _built(Visibility(T, S, causal, window), rows_per_token, rows_causal, device)


def _built(visibility: Visibility, rows_per_token: int, rows_causal: bool, device: torch.device) -> BlockMask:
    """The block mask from the definition, a strip of BLOCK rows at a time, so that it takes linear memory."""
    rows, columns = visibility.T * rows_per_token, visibility.S * rows_per_token
    some, every = [], []
    for start in range(0, rows, BLOCK):
        first, last = start // rows_per_token, -(-min(start + BLOCK, rows) // rows_per_token)
        strip = visibility.dense(first, last, device=device)
        strip = expand_rows(strip, visibility.past + first, rows_per_token, rows_causal)
        strip = strip[:, start - first * rows_per_token :][:, :BLOCK]
        strip = F.pad(strip, (0, -columns % BLOCK, 0, BLOCK - strip.shape[1]))  # a block at an edge is never full
        blocks = strip.unflatten(2, (-1, BLOCK))
        some.append(blocks.any(-1).any(1))
        every.append(blocks.all(-1).all(1))
    shown, full = torch.stack(some, 1), torch.stack(every, 1)
    return BlockMask.from_kv_blocks(
        *_listed(shown & ~full), *_listed(full), BLOCK_SIZE=BLOCK, seq_lengths=(rows, columns),
        mask_mod=_predicate(visibility, rows_per_token, rows_causal),
    )  # fmt: skip


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """(B, rows, columns) booleans -> how many in a row (B, 1, rows), and which, first (B, 1, rows, columns)."""
    blocks = blocks.unsqueeze(1)
    return blocks.sum(-1, dtype=torch.int32), blocks.int().argsort(dim=-1, descending=True, stable=True).int()
