"""Files that are absent, old, or complete: a reader at any moment, or after a crash, never sees half of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def replaced(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose content takes `path`'s place at the end, in one step; where that fails the old file stays."""
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, content: bytes) -> None:
    with replaced(path) as stream:
        stream.write(content)


def write_text(path: Path, text: str) -> None:
    """In UTF-8, lines ending as they are."""
    write_bytes(path, text.encode())


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
