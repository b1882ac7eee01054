"""Paths and names of checkpoints as commands take them, checked before transformers and torch are imported."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from headloom.core.errors import HeadloomError, near
from headloom.core.files import read_json
from headloom.core.locks import claimed

MODEL_TYPE = "headloom"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "vocab.txt", "tokenizer.model")


def check_checkpoint(source: str | Path, *, dtype: str = "auto") -> None:
    """Raise HeadloomError for a place where no checkpoint can be, or an unknown dtype."""
    if dtype not in DTYPES:
        raise HeadloomError(f"unknown dtype '{dtype}'.{near(dtype, DTYPES)} Allowed: {', '.join(DTYPES)}")
    where, file = locate(str(source))
    if not file and Path(where).is_dir() and not (Path(where) / "config.json").is_file():
        raise HeadloomError(
            f"'{source}' cannot be loaded: it holds no config.json. Give the folder of a checkpoint, a .gguf file, or "
            "the hub's 'owner/name'"
        )


def may_have_tokenizer(source: str | Path) -> bool:
    """Whether a tokenizer can be beside a checkpoint: not in a folder without any of its files."""
    where, file = locate(str(source))
    return bool(file) or not Path(where).is_dir() or any((Path(where) / name).is_file() for name in _TOKENIZER_FILES)


def is_graft(source: str | Path) -> bool:
    """Whether a checkpoint is a graft already. Raises HeadloomError where there is none."""
    check_checkpoint(source)
    where, file = locate(str(source))
    if file:  # other programs' files, which have no place for a graft
        return False
    if not Path(where).is_dir():
        from transformers import AutoConfig

        with saying(source), quiet():
            return getattr(AutoConfig.from_pretrained(where, trust_remote_code=False), MODEL_TYPE, None) is not None
    return (read_json(Path(where) / "config.json") or {}).get("model_type") == MODEL_TYPE


def new_folder(out: Path, *, besides: str | None = None) -> None:
    """Refuse a place that holds something already, other than a file called `besides`. Raises HeadloomError."""
    if out.exists() and (not out.is_dir() or any(entry.name != besides for entry in out.iterdir())):
        raise HeadloomError(f"'{out}' exists and is not empty: give a new folder, or remove this one")


@contextlib.contextmanager
def place_for(out: Path) -> Iterator[None]:
    """Hold a new folder's place from before the work till it is saved. Raises HeadloomError where something is there
    already, or another process is making it."""
    new_folder(out)
    with claimed(out):
        yield


def locate(source: str) -> tuple[str, str | None]:
    """What transformers calls a checkpoint: (folder or hub name, GGUF file in it or None).

    Raises: HeadloomError where there is none.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path), None
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise HeadloomError(f"'{source}' is a file, but no .gguf: give the folder of a checkpoint, or a GGUF file")
        return str(path.parent), path.name
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source) and not path.parent.is_dir():
        return source, None
    beside = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
    raise HeadloomError(
        f"'{source}' does not exist.{near(path.name, beside)} Give the folder of a checkpoint, a .gguf file, or the "
        "hub's 'owner/name'"
    )


def read_layers(layers: str) -> list[int]:
    """The indices that "0-3,8" names. Raises HeadloomError for what is no such text."""
    found: list[int] = []
    for part in layers.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None:
            raise HeadloomError(f"layers '{layers}' cannot be read at '{part}': write indices and ranges, \"0-3,8\"")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise HeadloomError(f"layers '{layers}': the range {part.strip()} runs backwards")
        found += range(first, last + 1)
    return found


@contextlib.contextmanager
def saying(source: str | Path) -> Iterator[None]:
    """Inside, any error of the libraries that read a checkpoint becomes one HeadloomError with its first line."""
    try:
        yield
    except HeadloomError:
        raise
    except Exception as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise HeadloomError(f"'{source}' cannot be loaded: {reason}") from error


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, transformers shows no progress bars: commands show their own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
