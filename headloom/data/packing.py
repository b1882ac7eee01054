"""Tokens in rows: documents are joined to one stream, the stream is cut into rows of the context's length, and a seed
sets the order of the rows.

    stream   <eos> document <eos> document <eos> ... document <eos>
    row i    stream[i (C-1) : i (C-1) + C]                            context C, stride C-1: neighbours share one token

A causal model predicts every token of a row except the first from the tokens before it. Because neighbouring rows share
one token, each token of the stream is predicted exactly once, except the very first, an end-of-text token that serves
as the begin token. A row may hold parts of several documents.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import torch
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast

from headloom.core.errors import HeadloomError
from headloom.data.corpus import Corpus
from headloom.data.roundtrip import lost_bytes
from headloom.data.sources import Document, shuffled
from headloom.data.tokenizer import is_bytes

DEFAULT_VALIDATION_BYTES = 2**20
DEFAULT_LEADING_BYTES = 2**14
LOST_AT_MOST = 0.01  # of the held-out bytes; above, bits per byte would be of another text
FEWEST_ROWS = 4  # contexts of training text; below, nothing is learned that holds for another text
FEW_ROWS, FEW_HELD_OUT = 100, 20  # contexts of either text below which a warning is due
_BATCH_CHARACTERS = 2**20


@dataclass(frozen=True, eq=False)
class TokenStream:
    """One split as a single run of token ids.

    Attributes:
        ids: (N,) unsigned integers; the first is the begin token.
        bytes: UTF-8 bytes of the texts; end-of-text tokens count as 0 bytes.
        documents: number of texts.
        lost: a lower bound of the share of bytes that cannot be recovered from the ids (headloom.data.roundtrip); None
            if it was not measured.
    """

    ids: np.ndarray
    bytes: int
    documents: int
    lost: float | None = None

    @property
    def predictions(self) -> int:
        """Number of predicted tokens: all except the first."""
        return max(0, len(self.ids) - 1)

    def rows(self, context: int) -> int:
        """Number of full rows of `context` tokens."""
        return self.predictions // (_checked(context) - 1)

    def row(self, index: int, context: int) -> torch.Tensor:
        """Row `index`: int64, shape (context,).

        The row after the last full one is the shorter rest; with fewer than two tokens there is nothing to predict.
        """
        start = index * (_checked(context) - 1)
        return torch.from_numpy(self.ids[start : start + context].astype(np.int64))


@dataclass(frozen=True, eq=False)
class TokenData:
    """The tokens with which a run is trained and measured.

    Attributes:
        train, validation: the two streams.
        leading: the part of the validation text that is read during a run; the same object as `validation` if that is
            the whole text.
        vocab_size: all ids are smaller.
        fingerprint: SHA-256 of vocabulary size and both streams: equal fingerprints mean equal tokens in equal order.
        title: one line for people.
        notes: warnings on the data: what was left out, that there is little text, that the tokenizer loses some of it.
            Usually empty.
    """

    train: TokenStream
    validation: TokenStream
    vocab_size: int
    title: str
    leading: TokenStream = field(default=None, kw_only=True)  # type: ignore[assignment]
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    fingerprint: str = field(init=False)

    def __post_init__(self) -> None:
        if self.leading is None:
            object.__setattr__(self, "leading", self.validation)
        digest = hashlib.sha256(f"{self.vocab_size}\0".encode())
        for stream in (self.train, self.validation):
            digest.update(f"{len(stream.ids)}\0{stream.bytes}\0".encode())
            digest.update(stream.ids.astype("<u4").tobytes())
        object.__setattr__(self, "fingerprint", digest.hexdigest())


def pack_documents(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast, *, check: bool = True
) -> TokenStream:
    """Tokenise documents into one stream, with an end-of-text token before, between and after them.

    With `check`, the ids are decoded again to measure how much of the text they lose.
    """
    dtype = np.uint16 if len(tokenizer) <= 2**16 else np.uint32
    end = np.array([tokenizer.eos_token_id], dtype)
    pieces, size, count, lost = [end], 0, 0, 0
    exact = is_bytes(tokenizer)
    for text, ids in _tokenise(documents, tokenizer):
        pieces += [np.asarray(ids, dtype), end]
        size += len(text.encode())
        count += 1
        if check and not exact:
            lost += lost_bytes(text, ids, tokenizer)  # type: ignore[arg-type]
    return TokenStream(np.concatenate(pieces), size, count, lost / max(1, size) if check else None)


def prepare(
    corpus: Corpus,
    tokenizer: PreTrainedTokenizerFast,
    *,
    context: int,
    validation_bytes: int | None = DEFAULT_VALIDATION_BYTES,
    leading_bytes: int | None = DEFAULT_LEADING_BYTES,
) -> TokenData:
    """Pack both splits of a corpus.

    Args:
        context: row length in tokens. It is compared with the amount of text here, so that a run cannot fail later.
        validation_bytes: the most bytes of validation text: a sample of documents that depends on their names, the last
            one cut (None: all).
        leading_bytes: the most bytes of these for evaluations during a run, chosen in the same way (None: all).

    Raises:
        HeadloomError: too little text to train on or to validate on, or a tokenizer that loses more than 1 % of the
            held-out text.
    """
    validation = list(corpus.validation) if validation_bytes is None else _sample(corpus.validation, validation_bytes)
    held = pack_documents(validation, tokenizer)
    part = held
    if leading_bytes is not None and leading_bytes < held.bytes:
        part = pack_documents(_sample(validation, leading_bytes), tokenizer)
    train = pack_documents(corpus.train, tokenizer, check=False)
    notes = [corpus.left_out] if corpus.left_out else []
    notes += _amount(corpus.title, train, held, context) + _lost(held.lost or 0.0)
    return TokenData(train, held, len(tokenizer), corpus.title, leading=part, notes=tuple(notes))


def _amount(title: str, train: TokenStream, held: TokenStream, context: int) -> list[str]:
    """A warning if there is little text. Raises HeadloomError if there is too little for a meaningful result."""
    rows, held_out = train.rows(context), held.rows(context)
    if rows < FEWEST_ROWS or held_out < 1:
        raise HeadloomError(
            f"too little text: {title} gives {len(train.ids):,} tokens to train on and {len(held.ids):,} held out; a "
            f"context of {context} needs at least {FEWEST_ROWS * (context - 1) + 1:,} and {context:,}. Use a shorter "
            "context (--tokens), give more text, or hold out more of it (validation_bytes)."
        )
    if rows >= FEW_ROWS and held_out >= FEW_HELD_OUT:
        return []
    return [
        f"warning: little text: {rows:,} contexts of {context} tokens to train on and {held_out:,} held out (below "
        f"{FEW_ROWS} and {FEW_HELD_OUT} numbers say little about any other text): give more"
    ]


def _lost(share: float) -> list[str]:
    if share > LOST_AT_MOST:
        raise HeadloomError(
            f"the tokenizer loses text: at least {share:.1%} of the held-out bytes do not come back from its "
            "tokens, and bits per byte would count them although no token carries them. Use a tokenizer that keeps "
            "all ('bytes', 'bpe:4096', one of GPT-2's kind), or text that this one was made for."
        )
    return [f"warning: the tokenizer loses at least {share:.2%} of the held-out bytes"] if share else []


def row_order(rows: int, seed: int, start: int, stop: int) -> np.ndarray:
    """Row numbers at positions start..stop-1 of a run's endless order.

    Each epoch is a fresh permutation of all rows, fixed by (seed, epoch).

    It depends on nothing else: not on the model, the batch size, or where reading began, so an interrupted run
    continues in place.
    """
    if rows < 1:
        raise HeadloomError(
            f"cannot order {rows} rows: there is no training text. Use a shorter context or give more text."
        )
    positions = np.arange(start, stop)
    order = np.empty(len(positions), np.int64)
    for epoch in range(start // rows, (max(stop, start + 1) - 1) // rows + 1):
        inside = positions // rows == epoch
        order[inside] = _permutation(rows, seed, epoch)[positions[inside] % rows]
    return order


class TrainingRows(Dataset):
    """The rows of a run in their order: item p is the row at position p, so the loader must not shuffle.

    The labels equal the ids: Hugging Face models shift them, and so predict C-1 tokens per row.
    """

    def __init__(self, stream: TokenStream, *, context: int, seed: int, count: int) -> None:
        self.stream, self.context = stream, context
        self.order = row_order(stream.rows(context), seed, 0, count)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, position: int) -> dict[str, torch.Tensor]:
        ids_T = self.stream.row(int(self.order[position]), self.context)
        return {"input_ids": ids_T, "labels": ids_T}


def _checked(context: int) -> int:
    if context < 2:
        raise HeadloomError(f"context={context}: a row needs at least 2 tokens, one to see and one to predict.")
    return context


@lru_cache(maxsize=4)
def _permutation(rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(rows)


def _tokenise(
    documents: Iterable[Document], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[str, np.ndarray | list[int]]]:
    if is_bytes(tokenizer):
        for document in documents:
            yield document.text, np.frombuffer(document.text.encode(), np.uint8)
        return
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True  # a special token's spelling inside a text is text
    for texts in _batches(documents):
        for text, encoding in zip(texts, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            yield text, encoding.ids


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    texts: list[str] = []
    characters = 0
    for document in documents:
        texts.append(document.text)
        characters += len(document.text)
        if characters >= _BATCH_CHARACTERS:
            yield texts
            texts, characters = [], 0
    if texts:
        yield texts


def _sample(documents: Iterable[Document], limit: int) -> list[Document]:
    if limit < 1:
        raise HeadloomError(
            f"validation_bytes={limit} leaves nothing to validate on. Give a positive number, or None for all."
        )
    by_name = {document.name: document for document in documents}
    kept: list[Document] = []
    for name in shuffled(by_name, 0):
        raw = by_name[name].text.encode()[:limit]
        text = raw.decode("utf-8", "ignore")
        if text:
            kept.append(Document(name, text))
        limit -= len(raw)
        if limit == 0:
            break
    if not kept:
        raise HeadloomError(
            "validation_bytes is smaller than the first character of the validation text. Give a larger number."
        )
    return sorted(kept, key=lambda document: document.name)
