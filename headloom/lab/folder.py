"""A study's folder: which one it is, what may be in it, and what its files are called."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.core.files import read_json, write_text
from headloom.core.locks import LOCK
from headloom.lab.fairness import differences

DEFAULT_NAME = "headloom-compare"


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_text(path, stream.getvalue())


def slug(label: str) -> str:
    """A label as a folder's name: letters, digits and `._=-`.

    >>> slug("iha:order=token:pseudo_heads=2")
    'iha-order=token-pseudo_heads=2'
    """
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", label).strip("-.") or "variant"


def open_folder(
    out: Path | str | None, study_hash: str, resolved: Mapping[str, Any], *, default: str = DEFAULT_NAME
) -> Path:
    """The folder for the study with this hash, made if absent.

    A given folder must be absent, empty, or hold this very study. Without one it is `default` in the current folder,
    or the first of default-2, -3, ... that is free or holds this study. `resolved` is what the hash was taken of; a
    refusal names what differs.
    """
    if out is not None:
        folder = Path(out)
        complaint = _complaint(folder, study_hash, resolved)
        if complaint:
            raise HeadloomError(complaint)
    else:
        number = 1
        folder = Path(default)
        while _complaint(folder, study_hash, resolved):
            number += 1
            folder = Path(f"{default}-{number}")
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadloomError(f"'{folder}' cannot be written ({error.strerror}): choose another --out") from None
    return folder


def _complaint(folder: Path, study_hash: str, resolved: Mapping[str, Any]) -> str:
    """Why the folder cannot take this study, or an empty text."""
    if not folder.exists():
        return ""
    if not folder.is_dir():
        return f"--out '{folder}' is a file: choose a new folder"
    held = read_json(folder / "study.json")
    if held is not None:
        if held.get("hash") == study_hash:
            return ""
        return (
            f"'{folder}' holds another study ({_what_differs(held, resolved)}): choose another --out, "
            f"delete the folder, or repeat its own command: {held.get('command')}"
        )
    if any(entry.name not in (LOCK, "runs", "study.yaml") for entry in folder.iterdir()) or any(
        (folder / "runs").glob("*")
    ):
        return f"'{folder}' is not empty and holds no study: choose a new folder for --out"
    return ""


def _what_differs(held: Mapping[str, Any], resolved: Mapping[str, Any], shown: int = 3) -> str:
    before = held.get("resolved")
    if not isinstance(before, dict):
        return "it does not say which"
    found = differences({"there": before, "here": resolved})
    texts = [f"{key} {values['there']!r} there, {values['here']!r} here" for key, values in found.items()]
    more = f"; and {len(texts) - shown} more" if len(texts) > shown else ""
    return "; ".join(text if len(text) < 160 else text.split(" ")[0] for text in texts[:shown]) + more
