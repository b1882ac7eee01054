"""Sources of documents: the standard library, files and folders (headloom.data.tables reads tables).

Every source yields `Document(name, text)`. Names are relative paths, so that the split into train and validation, which
uses a hash of the name, is the same on every machine.
"""

from __future__ import annotations

import codecs
import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from headloom.core.errors import HeadloomError
from headloom.core.files import read_json
from headloom.data.tables import TABLES, LeftOut, is_saved, json_rows, table_rows

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
# Files that are left out by their ending, with the way out.
_NO_TEXT = {
    **dict.fromkeys((".gz", ".tgz", ".zst", ".bz2", ".xz", ".zip", ".tar", ".7z"), "it is compressed: unpack it first"),
    **dict.fromkeys((".arrow", ".feather"), "it is part of a data set: give the folder that save_to_disk wrote"),
    ".ipynb": "it is a notebook: convert it first, jupyter nbconvert --to script",
}


@dataclass(frozen=True)
class Document:
    """One text with its name relative to the corpus."""

    name: str
    text: str


def shuffled(names: Iterable[str], seed: int) -> list[str]:
    """`names` in an order that depends on (seed, name) only, so that a sample is the same on every machine."""
    return sorted(names, key=lambda name: (hashlib.sha256(f"{seed}\0{name}".encode()).digest(), name))


def stdlib_documents(seed: int, limit: int) -> Iterator[Document]:
    """The Python standard library's own sources, in shuffled order.

    Raises HeadloomError where Python has none (zipped builds).
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [name for name in _walk(root, _is_left_out) if name.endswith(".py")]
    if not names:
        raise HeadloomError(
            "this Python carries no standard-library sources (a zipped or stripped build). "
            "Pass a text file or a folder as data instead."
        )
    for name in shuffled(names, seed):
        text = read_text(root / name, limit)
        if text is not None:
            yield Document(name, text)


def file_documents(path: Path, limit: int, column: str, left: LeftOut) -> Iterator[Document]:
    """The documents of one file: a table's rows, or the whole text. Raises HeadloomError when it is neither."""
    if path.suffix.lower() in TABLES:
        yield from numbered(table_rows(path, column, left), path.name)
        return
    way = _NO_TEXT.get(path.suffix.lower())
    text = None if way else read_text(path, limit)
    if text is None:
        raise HeadloomError(
            f"'{path}' is not a text file ({way or 'it holds zero bytes or is not UTF-8: convert it first'}). Allowed: "
            f"UTF-8 text, and {', '.join(TABLES)} with a '{column}' column."
        )
    yield Document(path.name, text)


def folder_documents(
    root: Path, seed: int, limit: int, column: str, left: LeftOut, asked: bool = False
) -> Iterator[Document]:
    """Every text below a folder, and every row of its tables, in shuffled order.

    Left out, and counted: hidden names, links, what is not UTF-8 text, JSON that holds no rows with that column, and
    folders inside that hold a model or a saved data set. Raises HeadloomError for a table that cannot be read, and when
    the column is `asked` for and no table is there.
    """
    names = _walk(root, _hidden, left)
    if asked and not any(Path(name).suffix.lower() in TABLES for name in names):
        raise HeadloomError(
            f"text_column='{column}' names a column of a table, and folder '{root}' holds none ({', '.join(TABLES)}): "
            "leave --text-column out"
        )
    for name in shuffled(names, seed):
        path, ending = root / name, Path(name).suffix.lower()
        if ending == ".json" and not any(column in row for row in (json_rows(path) or [])[:1]):
            left.add(f"JSON without '{column}' rows", ending)
        elif ending in TABLES:
            yield from numbered(table_rows(path, column, left), name)
        elif (text := None if ending in _NO_TEXT else read_text(path, limit)) is None:
            left.add("not UTF-8 text", ending or "no ending")
        else:
            yield Document(name, text)


def is_model(folder: Path) -> bool:
    """Whether a folder holds a checkpoint: its texts are settings and vocabularies."""
    config = read_json(folder / "config.json") or {}
    return "model_type" in config or "architectures" in config


def numbered(texts: Iterable[str], name: str) -> Iterator[Document]:
    """Texts as documents that are named by their number: name:000000000, name:000000001, ..."""
    for index, text in enumerate(texts):
        yield Document(f"{name}:{index:09d}", text)


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


def _hidden(part: str) -> bool:
    return part.startswith(".") or part == "__pycache__"


def _walk(root: Path, skip: Callable[[str], bool], left: LeftOut | None = None) -> list[str]:
    left = LeftOut() if left is None else left
    names: list[str] = []
    for folder, subfolders, files in os.walk(root, followlinks=False):
        kept = []
        for part in sorted(subfolders):
            path = Path(folder, part)
            why = _why_not(path, skip) or ("data sets inside" if is_saved(path) else "models" if is_model(path) else "")
            if why:
                left.add(why)
            else:
                kept.append(part)
        subfolders[:] = kept
        for part in files:
            path = Path(folder, part)
            why = _why_not(path, skip) or ("" if path.is_file() else "pipes, sockets and devices")
            if why:
                left.add(why)
            else:
                names.append(path.relative_to(root).as_posix())
    return sorted(names)


def _why_not(path: Path, skip: Callable[[str], bool]) -> str:
    return "hidden" if skip(path.name) else "links" if path.is_symlink() else ""
