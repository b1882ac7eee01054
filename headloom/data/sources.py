"""Where documents come from: the standard library, files, folders, tables, and Hugging Face data sets.

Every source yields `Document(name, text)`; a name is relative (never a machine's path), so that the split into train
and validation, which hashes names, is the same on every machine.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headloom.core.errors import HeadloomError, near

TABLES = (".jsonl", ".parquet")
# Left out of the standard-library corpus: fixtures that are odd on purpose (test), and packages that systems install
# separately or that newer Pythons dropped, so that slim and full installations hold the same text; generated tables
# and one generated 700 kB topic file.
_STDLIB_LEFT_OUT = frozenset(
    (
        "site-packages",
        "dist-packages",
        "__pycache__",
        "test",
        "tests",
        "idle_test",
        "idlelib",
        "tkinter",
        "turtledemo",
        "lib2to3",
        "distutils",
        "ensurepip",
        "encodings",
        "pydoc_data",
        "__phello__",
        "lib-dynload",
    )
)


@dataclass(frozen=True)
class Document:
    """One text with its name relative to the corpus."""

    name: str
    text: str


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    """`names` in an order fixed by (seed, name) alone, so a sample is the same wherever it is drawn."""
    return sorted(names, key=lambda name: (hashlib.sha256(f"{seed}\0{name}".encode()).digest(), name))


def stdlib_documents(seed: int, limit: int) -> Iterator[Document]:
    """The Python standard library's own sources, in shuffled order.

    Raises HeadloomError where Python has none (zipped builds).
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _walk(root, skip=_is_left_out) if name.endswith(".py")]
    if not names:
        raise HeadloomError(
            "this Python carries no standard-library sources (a zipped or stripped build). "
            "Pass a text file or a folder as data instead."
        )
    for name in shuffled(names, seed):
        text = read_text(root / name, limit)
        if text is not None:
            yield Document(name, text)


def file_documents(path: Path, limit: int) -> Iterator[Document]:
    """The documents of one file: a table's rows, or the whole text. Raises HeadloomError when it is not text."""
    if path.suffix.lower() in TABLES:
        yield from _table_rows(path, path.name)
        return
    text = read_text(path, limit)
    if text is None:
        raise HeadloomError(
            f"'{path}' is not a text file (it holds zero bytes or is not UTF-8). "
            "Allowed: UTF-8 text, .jsonl and .parquet with a 'text' column. Convert it to UTF-8 first."
        )
    yield Document(path.name, text)


def folder_documents(root: Path, seed: int, limit: int) -> Iterator[Document]:
    """Every text below a folder in shuffled order; hidden names, links and files that are not text are left out."""
    for name in shuffled(_walk(root, skip=lambda part: part.startswith(".") or part == "__pycache__"), seed):
        path = root / name
        if path.suffix.lower() in TABLES:
            yield from _table_rows(path, name)
        else:
            text = read_text(path, limit)
            if text is not None:
                yield Document(name, text)


def hub_documents(name: str) -> Iterator[Document]:
    """The 'text' column of a Hugging Face data set's train split, streamed from its beginning.

    No code of the data set is run.
    """
    try:
        import datasets

        for index, row in enumerate(datasets.load_dataset(name, split="train", streaming=True)):
            yield Document(f"{name}:{index:09d}", _text_of(row, f"data set '{name}'"))
    except HeadloomError:
        raise
    except Exception as error:  # the hub's own errors have no common base: network, missing name, gated, bad format
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise HeadloomError(
            f"'{name}' is no file or folder here, and reading it as a Hugging Face data set failed: {reason} "
            "Pass a file, a folder, 'stdlib', or check the data set's name and the network."
        ) from error


def read_text(path: Path, limit: int) -> str | None:
    """A UTF-8 file's text (a byte order mark dropped), or None when its bytes are not text.

    Of a file longer than `limit` bytes only the beginning is read, a little more than `limit`, so that the caller
    sees that there was more. Raises HeadloomError when the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(limit + 8)
    except OSError as error:
        raise HeadloomError(f"'{path}' cannot be read ({error.strerror}). Check its permissions, or move it.") from None
    if b"\0" in raw:
        return None
    try:
        return codecs.getincrementaldecoder("utf-8-sig")().decode(raw, final=len(raw) < limit + 8)
    except UnicodeDecodeError:
        return None


def _is_left_out(part: str) -> bool:
    return part.startswith((".", "_sysconfigdata", "config-")) or part in _STDLIB_LEFT_OUT


def _walk(root: Path, skip: Callable[[str], bool]) -> list[str]:
    names: list[str] = []
    for folder, subfolders, files in os.walk(root, followlinks=False):
        subfolders[:] = sorted(part for part in subfolders if not skip(part))
        for part in files:
            path = Path(folder, part)
            if not skip(part) and path.is_file() and not path.is_symlink():
                names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _table_rows(path: Path, name: str) -> Iterator[Document]:
    rows = _jsonl_rows(path) if path.suffix.lower() == ".jsonl" else _parquet_rows(path)
    for index, text in enumerate(rows):
        yield Document(f"{name}:{index:09d}", text)


def _jsonl_rows(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            where = f"'{path}' line {number}"
            try:
                row = json.loads(raw)
            except (ValueError, UnicodeDecodeError) as error:
                raise HeadloomError(
                    f"{where} is not JSON ({error}). A .jsonl file holds one object with a 'text' field a line."
                ) from None
            yield _text_of(row, where)


def _parquet_rows(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise HeadloomError(
            f"'{path}' is not a Parquet file ({str(error).splitlines()[0]}). Check the file or its ending."
        ) from None
    with table:
        if "text" not in table.schema_arrow.names:
            _text_of(dict.fromkeys(table.schema_arrow.names), f"'{path}'")
        for batch in table.iter_batches(batch_size=256, columns=["text"]):
            for row in batch.to_pylist():
                yield _text_of(row, f"'{path}'")


def _text_of(row: object, where: str) -> str:
    if not isinstance(row, dict):
        raise HeadloomError(f"{where} holds {type(row).__name__}, not an object. Each row needs a 'text' field.")
    if "text" not in row:
        fields = [str(field) for field in row]
        raise HeadloomError(
            f"{where} has no 'text' column; it has: {', '.join(fields) or 'none'}.{near('text', fields)} "
            "Rename the column to 'text'."
        )
    if not isinstance(row["text"], str):
        raise HeadloomError(
            f"{where}: 'text' is {type(row['text']).__name__}, not a string. Drop or convert such rows."
        )
    return row["text"]
