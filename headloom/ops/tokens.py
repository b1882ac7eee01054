"""Where this call's tokens stand: positions (they only rotate) and documents (they decide what is seen)."""

from __future__ import annotations

import torch
from torch import Tensor

from headloom.core.errors import HeadloomError
from headloom.ops.cache import Seen


def place(
    B: int,
    T: int,
    device: torch.device,
    *,
    past: int,
    held: Seen | None,
    positions: Tensor | None,
    padding: Tensor | None,
    documents: Tensor | None,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(positions (1 or B, T), documents (B, T) or None) of a call after `past` cached tokens.

    Without document ids the tokens go on in the document of the last real cached one, and a position that does not
    exceed that of the real token before it opens a new one, unless the call's mask is `exact`.
    """
    given = positions is not None
    positions = torch.arange(past, past + T, device=device) if positions is None else positions
    positions = positions.unsqueeze(0) if positions.dim() == 1 else positions
    _check("positions", positions, (1, B), (T,))
    real = None
    if padding is not None:
        _check("padding", padding, (B,), (T, past + T))
        real = padding[:, -T:].bool()
    if documents is not None:
        documents = documents.unsqueeze(0).expand(B, -1) if documents.dim() == 1 else documents
        _check("documents", documents, (B,), (T, past + T))
        documents = documents[:, -T:]
    elif given and not exact:
        documents = restarts(positions, real, held)
    elif held is not None and held.documents_BS is not None:
        documents = _last(held, positions.expand(B, -1))[1]
        documents = None if documents is None else documents.expand(-1, T)
    if real is not None:
        documents = torch.zeros(B, T, dtype=torch.long, device=device) if documents is None else documents
        documents = documents.expand(B, -1).masked_fill(~real, -1)
    elif documents is not None:
        documents = documents.expand(B, -1)
    return positions, documents


def restarts(positions: Tensor, real: Tensor | None = None, held: Seen | None = None) -> Tensor | None:
    """Document ids (B, T) from positions that restart, or None where none does (while compiling: always ids)."""
    if positions.is_meta:  # shapes only: nothing restarts
        return None
    known = [x for x in (real, *(() if held is None else (held.positions_BS, held.documents_BS))) if x is not None]
    rows = max(x.shape[0] for x in (positions, *known))
    positions = positions.expand(rows, -1)
    last, document = _last(held, positions)
    if real is None:
        before = torch.cat((last, positions[:, :-1]), 1)
    else:  # the position of the last real token before each token
        reach = torch.where(real, torch.arange(1, positions.shape[1] + 1, device=positions.device), 0).cummax(1).values
        reach = torch.cat((torch.zeros_like(reach[:, :1]), reach[:, :-1]), 1)
        before = torch.cat((last, positions), 1).gather(1, reach)
    opens = positions <= before
    opens = opens if real is None else opens & real
    if not torch.compiler.is_compiling() and document is None and not bool(opens.any()):
        return None
    first = 0 if document is None else document
    return first + opens.long().cumsum(1)


def _last(held: Seen | None, positions: Tensor) -> tuple[Tensor, Tensor | None]:
    """Position and document of the last real cached token of each row, (rows, 1) each."""
    rows = positions.shape[0]
    if held is None:
        return positions.new_full((rows, 1), torch.iinfo(positions.dtype).min), None
    cached = held.positions_BS.expand(rows, -1)
    if held.documents_BS is None:
        return cached[:, -1:].to(positions.dtype), None
    documents = held.documents_BS.expand(rows, -1)
    place = torch.where(documents >= 0, torch.arange(documents.shape[1], device=documents.device), -1).amax(1, True)
    last = cached.gather(1, place.clamp(min=0)).masked_fill(place < 0, torch.iinfo(positions.dtype).min)
    return last.to(positions.dtype), documents.gather(1, place.clamp(min=0)).clamp(min=0)


def cover(documents_BS: Tensor | None, padding: Tensor | None, batch: int, S: int) -> Tensor | None:
    """Documents of all S keys once a padding mask over the cache and this call has been applied."""
    if padding is None or padding.shape[1] < S:
        return documents_BS
    real = padding[:, -S:].bool()
    if documents_BS is None:
        return real.long() - 1
    return documents_BS.expand(batch, -1).masked_fill(~real, -1)


def _check(name: str, x: Tensor, rows: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    fits = x.dim() == 2 and any(x.shape[0] == n for n in rows) and any(x.shape[1] == n for n in lengths)
    if not fits:  # compared one by one, because `in` does not compare a compiler's sizes
        allowed = " or ".join(f"({b}, {t})" for b in dict.fromkeys(rows) for t in dict.fromkeys(lengths))
        raise HeadloomError(f"{name} must have shape {allowed}, not {tuple(x.shape)}")
