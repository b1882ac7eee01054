"""A corpus: documents split into train and validation, with a fingerprint of exactly what was read."""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headloom.core.errors import HeadloomError, near
from headloom.data.sources import Document, file_documents, folder_documents, is_model, numbered, stdlib_documents
from headloom.data.tables import TABLES, TEXT, LeftOut, hub_rows, is_saved, need_package, saved_splits

DEFAULT_LIMIT_BYTES = 64 * 2**20
VALIDATION_SHARE = 0.1
VALIDATION_SPLITS = ("validation", "test")  # of a data set that has splits, the first one there


@dataclass(frozen=True)
class Corpus:
    """Documents sorted by name, each in exactly one split.

    Attributes:
        train, validation: the two splits, neither empty.
        fingerprint: SHA-256 over split, name and text of every document: equal fingerprints mean equal data.
        title: one line for people: what was read and how much of it.
        left_out: what was found but is in neither split, with counts and reasons; "" if nothing was left out.
    """

    train: tuple[Document, ...]
    validation: tuple[Document, ...]
    fingerprint: str
    title: str
    left_out: str = ""


def load_corpus(
    spec: str | Path = "stdlib", *, limit_bytes: int | None = None, seed: int = 0, text_column: str | None = None
) -> Corpus:
    """Read text and split it by document.

    Args:
        spec: "stdlib" (the Python standard library's own sources, without tests, generated tables and optional
            packages); a UTF-8 file; a table (.jsonl, .json, .csv, .tsv, .parquet), every row a document; a folder of
            these, read recursively; a folder that `save_to_disk` of `datasets` wrote; or, if no such path exists, the
            id 'owner/name' of a Hugging Face data set, whose train split is streamed.
        limit_bytes: the most UTF-8 bytes of text to read (None: 64 MiB). From a folder, a sample that depends on (seed,
            names) is read; from a file, table or data set, its beginning. The last document is cut to fit.
        seed: for that sample only; the split does not depend on it.
        text_column: the column of tables and data sets that holds the text (None: "text").

    A saved data set with splits is trained on "train" and validated on "validation", or on "test" if there is no
    "validation". Other texts are split here: about 10 % of the documents, chosen by a hash of the name, are for
    validation; of a single document, the last 10 %. Blank documents are dropped, and those that repeat an earlier text
    byte for byte, so that no validation text is trained on. `Corpus.left_out` counts them.

    Raises:
        HeadloomError: the path is missing, the file is not text, a table has no such column, or there is no text.
    """
    limit = _limit(limit_bytes)
    left = LeftOut()
    what, documents, held_out = _source(str(spec), seed, limit, text_column, left)
    seen: set[bytes] = set()
    validation, validation_cut = _take(_distinct(held_out, seen, left), limit)  # first: training gives way to it
    kept, cut = _take(_distinct(documents, seen, left), limit)
    if not kept or (held_out and not validation):
        raise HeadloomError(
            f"no text in {what}: it is empty or holds nothing that is read"
            f"{f' (left out: {left})' if left.counts else ''}. "
            f"Give UTF-8 text files, or {', '.join(TABLES)} with a '{text_column or TEXT}' column."
        )
    if held_out:
        splits = _sorted(kept), _sorted(validation)
    else:
        splits = _split(_sorted(kept), what)
    count, size = len(kept) + len(validation), _size(kept) + _size(validation)
    title = f"{what}: {count} {'document' if count == 1 else 'documents'}, {size:,} bytes"
    title += f" (cut at {limit:,})" if cut or validation_cut else ""
    return Corpus(*splits, _fingerprint(*splits), title, f"left out of {what}: {left}" if left.counts else "")


def check_corpus(
    spec: str | Path = "stdlib", *, limit_bytes: int | None = None, text_column: str | None = None
) -> None:
    """Raise HeadloomError for errors that the name alone shows, without reading a text and without torch."""
    _limit(limit_bytes)
    _is_hub_id(str(spec), text_column)


def _limit(given: int | None) -> int:
    limit = DEFAULT_LIMIT_BYTES if given is None else given
    if limit < 1:
        raise HeadloomError(
            f"limit_bytes={limit} leaves no text. Give a positive number of bytes, or None for {DEFAULT_LIMIT_BYTES}."
        )
    return limit


def _source(
    spec: str, seed: int, limit: int, column: str | None, left: LeftOut
) -> tuple[str, Iterable[Document], Iterable[Document]]:
    """A title of the source, its documents, and the documents of its own validation split (empty if it has none)."""
    path, named = Path(spec).expanduser(), column or TEXT
    if _is_hub_id(spec, column):
        return f"Hugging Face data set '{spec}'", numbered(hub_rows(spec, named, left), spec), ()
    if spec == "stdlib":
        python = f"Python {sys.version_info.major}.{sys.version_info.minor} standard library"
        return python, stdlib_documents(seed, limit), ()
    if path.is_dir():
        name = path.resolve().name
        if is_saved(path):
            return _saved(path, f"data set '{name}'", named, left)
        return f"folder '{name}'", folder_documents(path, seed, limit, named, left, column is not None), ()
    return f"file '{path.name}'", file_documents(path, limit, named, left), ()


def _is_hub_id(spec: str, column: str | None) -> bool:
    """True for the id of a data set on the hub; False for the standard library, a file or a folder. Raises
    HeadloomError for anything else, for a column of a text that has no columns, and for a missing package."""
    path = Path(spec).expanduser()
    if spec == "stdlib":
        _no_column(column, "the standard library")
        return False
    if path.is_dir():
        if is_saved(path):
            need_package("datasets", f"data set '{spec}'")
        elif is_model(path):
            raise HeadloomError(
                f"'{spec}' holds a model (its config.json says so), no text: give a text file or a folder of texts"
            )
        return False
    if path.is_file():
        if path.suffix.lower() not in TABLES:
            _no_column(column, f"'{spec}'")
        elif path.suffix.lower() == ".parquet":
            need_package("pyarrow", f"'{spec}'")
        return False
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
        need_package("datasets", f"'{spec}' is no file or folder here, and a Hugging Face data set")
        return True
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    hint = near(path.name, beside) or near(spec, ["stdlib"])
    raise HeadloomError(
        f"'{spec}' does not exist.{hint} Allowed: 'stdlib', a text file, a folder, {', '.join(TABLES)} with a text "
        "column, a folder that save_to_disk wrote, or a Hugging Face data set 'owner/name'."
    )


def _saved(path: Path, what: str, column: str, left: LeftOut) -> tuple[str, Iterable[Document], Iterable[Document]]:
    """As `_source`, for a saved data set."""
    splits = saved_splits(path, column, left)
    train = next(iter(splits)) if len(splits) == 1 else "train"
    if train not in splits:
        raise HeadloomError(
            f"{what} has the splits {', '.join(splits)}, but none called 'train': give the folder of the one to read"
        )
    held = next((name for name in VALIDATION_SPLITS if name in splits and name != train), None)
    for name in splits.keys() - {train, held}:
        left.add(f"split '{name}'")
    named = {name: numbered(rows, f"{name or path.resolve().name}") for name, rows in splits.items()}
    if held is None:
        return what, named[train], ()
    return f"{what} (trained on its split '{train}', validated on '{held}')", named[train], named[held]


def _no_column(column: str | None, what: str) -> None:
    if column is not None:
        raise HeadloomError(
            f"text_column='{column}' names a column of a table, and {what} is plain text: leave --text-column out, or "
            f"give {', '.join(TABLES)} or a data set"
        )


def _distinct(documents: Iterable[Document], seen: set[bytes], left: LeftOut) -> Iterator[Document]:
    for document in documents:
        digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
        if not document.text.strip():
            left.add("blank texts")
        elif digest in seen:
            left.add("texts that repeat another")
        else:
            seen.add(digest)
            yield document


def _sorted(documents: Iterable[Document]) -> tuple[Document, ...]:
    return tuple(sorted(documents, key=lambda document: document.name))


def _size(documents: Iterable[Document]) -> int:
    return sum(len(document.text.encode()) for document in documents)


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


def _split(documents: tuple[Document, ...], what: str) -> tuple[tuple[Document, ...], tuple[Document, ...]]:
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
