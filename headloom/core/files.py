"""Files and folders are written completely or not at all, even if the program or the machine stops in between."""

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

PARTIAL = ".headloom-partial"  # a file or folder whose name ends like this was never completed and may be deleted
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFull(RunError):
    """Nothing more can be written."""


@contextmanager
def saying_when_full(place: Path, kept: str = "what was finished is kept and whole") -> Iterator[None]:
    """Replace any library's error for a full disk by DiskFull: one line that says which disk is full, what was `kept`,
    and what to do."""
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
    """Whether an error, or one of its causes, means that a disk is full, a quota is used up or a file is too large.

    Libraries that are not written in Python raise errors without a number. They are recognised by their text:
    safetensors and tokenizers use the operating system's words, torch uses its own.
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
    """A stream. At the end its content replaces the file `path` in one step; on an error the old file stays."""
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
    """A temporary folder to fill. At the end it is renamed to `out`, which must not exist or be empty, in one step.

    On an error nothing of it remains. What an earlier, killed program left of such a folder is removed first.

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
    """Replace a file's content in one step. Raises DiskFull."""
    with replaced(path) as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8 in one step, without changing its line ends."""
    write_bytes(path, text.encode())


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a table as CSV, whole or not at all: a line of column names, then the rows."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, stream.getvalue())


def write_json(path: Path, value: Any) -> None:
    """Write a value as JSON in one step. Raises ValueError for NaN and infinities, which JSON does not have."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file, or None if the file is missing or does not hold one."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
