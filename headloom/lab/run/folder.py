"""A study's folder: which one it is, and what may be in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.core.locks import LOCK
from headloom.lab.run.growth import differing_runs
from headloom.records.manifest import RUNS, STUDY, STUDY_YAML, Manifest

DEFAULT_NAME = "headloom-compare"


def open_study_folder(
    out: Path | str | None, study_hash: str, resolved: Mapping[str, Any], *, default: str = DEFAULT_NAME
) -> Path:
    """The folder for the study with this hash, made if absent.

    A given folder must be absent, empty, or hold this very study or one that has runs in common with it. Without one it
    is `default` in the current folder, or the first of default-2, -3, ... that is free or holds this study. `resolved`
    is what the hash was taken of; a refusal names what differs.
    """
    if out is not None:
        folder = Path(out)
        refuse_other(folder, lambda held: {} if held.hash == study_hash else differing_runs(held, resolved))
    else:
        number = 1
        folder = Path(default)
        while _what_else(folder) or ((held := STUDY.read_if_there(folder)) and held.hash != study_hash):
            number += 1
            folder = Path(f"{default}-{number}")
    try:
        (folder / RUNS).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HeadloomError(f"'{folder}' cannot be written ({error.strerror}): choose another --out") from None
    return folder


def refuse_other(folder: Path, differing: Callable[[Manifest], Mapping[str, Mapping[str, Any]]]) -> None:
    """Refuse a folder that holds something else, or a study none of whose runs can be used again.

    Args:
        differing: what a held study (its manifest) differs in from the one that is to be run: key -> {"there": value,
            "here": value}; empty where they have runs in common.
    """
    if complaint := _what_else(folder):
        raise HeadloomError(complaint)
    held = STUDY.read_if_there(folder)
    if held is not None and (found := differing(held)):
        raise HeadloomError(
            f"'{folder}' holds another study ({_said(found)}), and none of its runs can be used again: choose another "
            f"--out, delete the folder, or repeat its own command: {held.command}"
        )


def _what_else(folder: Path) -> str:
    """Why the folder can take no study, or an empty text."""
    if not folder.exists():
        return ""
    if not folder.is_dir():
        return f"--out '{folder}' is a file: choose a new folder"
    if STUDY.is_in(folder):
        return ""
    if any(entry.name not in (LOCK, RUNS, STUDY_YAML) for entry in folder.iterdir()) or any((folder / RUNS).glob("*")):
        return f"'{folder}' is not empty and holds no study: choose a new folder for --out"
    return ""


def _said(differing: Mapping[str, Mapping[str, Any]], shown: int = 3) -> str:
    texts = [f"{key} {values['there']!r} there, {values['here']!r} here" for key, values in differing.items()]
    more = f"; and {len(texts) - shown} more" if len(texts) > shown else ""
    return "; ".join(text if len(text) < 160 else text.split(" ")[0] for text in texts[:shown]) + more
