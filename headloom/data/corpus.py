"""A corpus: documents split into train and validation, with a fingerprint of exactly what was read."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headloom.core.errors import HeadloomError, near
from headloom.data.sources import TABLES, Document, file_documents, folder_documents, hub_documents, stdlib_documents

DEFAULT_LIMIT_BYTES = 64 * 2**20
VALIDATION_SHARE = 0.1


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by name, each in exactly one split.

    Attributes:
        train, validation: the two splits, neither empty.
        fingerprint: SHA-256 over split, name and text of every document: equal fingerprints mean equal data.
        title: one line for people: what was read and how much of it.
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    fingerprint: str
    title: str


def load_corpus(spec: str | Path = "stdlib", *, limit_bytes: int | None = None, seed: int = 0) -> Corpus:
    """Read text and split it by document.

    Args:
        spec: "stdlib" (the Python standard library's own sources, without tests, generated tables and optional
            packages); a UTF-8 file; a .jsonl or .parquet file with a 'text' column; a folder of these, read
            recursively; or, if no such path exists, the id 'owner/name' of a Hugging Face data set, streamed.
        limit_bytes: at most so many UTF-8 bytes of text are read (None: 64 MiB). Of a folder a sample fixed by
            (seed, names) is taken, of a file, table or data set its beginning. The last document is cut to fit.
        seed: of that sample only; the split does not depend on it.

    About 10 % of the documents, chosen by a hash of the name, are validation; a corpus of one document is split at
    its last 10 %. Documents that repeat an earlier text byte for byte are dropped, so that no validation text was
    trained on; so are blank ones.

    Raises:
        HeadloomError: the path is missing, the file is not text, or there is no text.
    """
    limit = DEFAULT_LIMIT_BYTES if limit_bytes is None else limit_bytes
    if limit < 1:
        raise HeadloomError(
            f"limit_bytes={limit} leaves no text. Give a positive number of bytes, or None for {DEFAULT_LIMIT_BYTES}."
        )
    documents, what = _source(str(spec), seed, limit)
    kept, cut = _take(_distinct(documents), limit)
    if not kept:
        raise HeadloomError(
            f"no text in {what}: it is empty or holds nothing readable as UTF-8. "
            "Give UTF-8 text files, or .jsonl or .parquet with a 'text' column."
        )
    train, validation = _split(sorted(kept, key=lambda document: document.name), what)
    count, size = len(kept), sum(len(document.text.encode()) for document in kept)
    noun = "document" if count == 1 else "documents"
    title = f"{what}: {count} {noun}, {size:,} bytes" + (f" (cut at {limit:,})" if cut else "")
    return Corpus(train, validation, _fingerprint(train, validation), title)


def _source(spec: str, seed: int, limit: int) -> tuple[Iterator[Document], str]:
    path = Path(spec).expanduser()
    if spec == "stdlib":
        return stdlib_documents(
            seed, limit
        ), f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"
    if path.is_dir():
        return folder_documents(path, seed, limit), f"folder '{path.resolve().name}'"
    if path.is_file():
        return file_documents(path, limit), f"file '{path.name}'"
    if path.exists():
        raise HeadloomError(
            f"'{spec}' is neither a file nor a folder. Give a text file, a folder of texts, or 'stdlib'."
        )
    looks_like_id = (
        re.fullmatch(r"[\w.-]+/[\w.-]+", spec)
        and not path.parent.is_dir()
        and path.suffix.lower() not in (*TABLES, ".txt", ".md", ".py")
    )
    if looks_like_id and not spec.startswith("."):
        return hub_documents(spec), f"Hugging Face data set '{spec}'"
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = near(path.name, beside) or near(spec, ["stdlib"])
    raise HeadloomError(
        f"'{spec}' does not exist.{hint} Allowed: 'stdlib', a text file, a folder, .jsonl or .parquet with a "
        "'text' column, or a Hugging Face data set 'owner/name'."
    )


def _distinct(documents: Iterable[Document]) -> Iterator[Document]:
    seen: set[bytes] = set()
    for document in documents:
        if document.text.strip():
            digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
            if digest not in seen:
                seen.add(digest)
                yield document


def _take(documents: Iterable[Document], limit: int) -> tuple[list[Document], bool]:
    """Documents up to `limit` bytes of text, and whether anything was cut off."""
    kept: list[Document] = []
    left = limit
    for document in documents:
        if left == 0:
            return kept, True
        raw = document.text.encode("utf-8", "replace")  # lone surrogates, which JSON can spell, become '?'
        if len(raw) > left:
            text = raw[:left].decode("utf-8", "ignore")
            return ([*kept, Document(document.name, text)] if text.strip() else kept), True
        kept.append(Document(document.name, raw.decode()))
        left -= len(raw)
    return kept, False


def _split(documents: list[Document], what: str) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    if len(documents) == 1:
        return _split_text(documents[0], what)
    by_hash = sorted(documents, key=lambda document: (_position(document.name), document.name))
    chosen = {document.name for document in by_hash if _position(document.name) < VALIDATION_SHARE}
    chosen = chosen or {by_hash[0].name}
    if len(chosen) == len(documents):
        chosen.remove(by_hash[-1].name)
    train = tuple(document for document in documents if document.name not in chosen)
    return train, tuple(document for document in documents if document.name in chosen)


def _split_text(document: Document, what: str) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
    text = document.text
    at = len(text) - max(1, round(len(text) * VALIDATION_SHARE))
    if at < 1:
        raise HeadloomError(
            f"{what} holds {len(text)} character: too little to split into train and validation. Give more text."
        )
    return (Document(f"{document.name}[:90%]", text[:at]),), (Document(f"{document.name}[90%:]", text[at:]),)


def _position(name: str) -> float:
    """A number in [0, 1) that depends on the name alone."""
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def _fingerprint(train: Iterable[Document], validation: Iterable[Document]) -> str:
    digest = hashlib.sha256()
    for split, documents in (("train", train), ("validation", validation)):
        for document in documents:
            for part in (split, document.name, document.text):
                raw = part.encode("utf-8", "surrogatepass")
                digest.update(len(raw).to_bytes(8, "big") + raw)
    return digest.hexdigest()
