"""Files and folders that are absent, old, or complete: nobody ever sees half of one, not even after a crash."""

from __future__ import annotations

import csv
import errno
import io
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from headloom.core.errors import HeadloomError, RunError

PARTIAL = ".headloom-partial"  # ends names that nobody else uses: what has one is ours, and of no worth
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(RunError):
    """Nothing more can be written."""


@contextmanager
def saying_when_full(place: Path, kept: str = "what was finished is kept and whole") -> Iterator[None]:
    """Turns what libraries raise when a disk is full into one line: which disk, what was `kept`, and the way out."""
    try:
        yield
    except HeadloomError:
        raise
    except Exception as error:
        if not is_full(error):
            raise
        text = " ".join(str(error).split())
        how = "" if os.strerror(errno.ENOSPC) in text else f" ({text[:200]})"
        raise DiskFull(
            f"the disk that holds '{place}' is full{how}: {kept}; free some space, and give the same command again"
        ) from error


def is_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that a disk, a quota or a file takes no more.

    Libraries not written in Python say it in words: safetensors and tokenizers the system's, torch its own.
    """
    words = [word for code in _FULL for word in (os.strerror(code), f"os error {code})")]
    words += ["PytorchStreamWriter failed writing", "unexpected pos"]
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        if not isinstance(error, OSError) and any(word in str(error) for word in words):
            return True
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return False


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content takes `path`'s place at the end, in one step; where that fails the old file stays."""
    partial = path.with_name(path.name + PARTIAL)
    try:
        with saying_when_full(path):
            with partial.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def whole_folder(out: Path, kept: str = "nothing was saved") -> Iterator[Path]:
    """A folder to fill, which then becomes `out` (absent or empty till then) in one step.

    Where that fails nothing of it is left; what a kill left of an earlier one is replaced.

    Raises DiskFull, and HeadloomError where nothing can be written.
    """
    partial = out.with_name(out.name + PARTIAL)
    try:
        with saying_when_full(out, kept):
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            yield partial
            if out.is_dir():
                out.rmdir()
            partial.replace(out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            raise HeadloomError(f"'{out}' cannot be written ({error.strerror or error}): give another folder") from None
        raise


def write_bytes(path: Path, content: bytes) -> None:
    with replaced(path) as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """In UTF-8, lines ending as they are."""
    write_bytes(path, text.encode())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as CSV, whole or not at all: a line of column names, then the rows."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, stream.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Raises ValueError for NaN and infinities, which JSON does not have."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file, or None if there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
