"""A run's mixes.npz and pictures.npz: learned weights as float32 arrays, by the parameter's name in the model.

mixes.npz     <name>: the mix after training, in its own shape
pictures.npz  for each weight that a report shows five arrays: <name>/start and <name>/end, matrices before and after
              training; <name>/rows and <name>/columns, texts; <name>/axes, what rows and columns are

Neither file is written where there is nothing to write. Their format is that of the run's config.json.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headloom.core.errors import HeadloomError
from headloom.core.files import replaced
from headloom.records.runs import MIXES, PICTURES

Array = NDArray[np.float32]


@dataclass(frozen=True)
class WeightPicture:
    """A learned weight as a matrix (rows, columns), before and after training, with what its rows and columns are:
    a name for each, and `down` and `across` for all of them."""

    start: Array
    end: Array
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    down: str
    across: str


def write_mixes(folder: Path, mixes: Mapping[str, Array]) -> None:
    """Write mixes.npz, whole or not at all; no file if there are none."""
    _write(folder / MIXES, dict(mixes))


def read_mixes(folder: Path) -> dict[str, Array]:
    """The mixes of a run, by the parameter's name. Raises HeadloomError for a file that is absent or damaged."""
    with _opened(folder / MIXES) as saved:
        return {name: np.asarray(saved[name], dtype=np.float32) for name in saved.files}


def write_pictures(folder: Path, pictures: Mapping[str, WeightPicture]) -> None:
    """Write pictures.npz, whole or not at all; no file if there are none."""
    arrays: dict[str, Any] = {}
    for name, picture in pictures.items():
        arrays[f"{name}/start"], arrays[f"{name}/end"] = picture.start, picture.end
        arrays[f"{name}/rows"], arrays[f"{name}/columns"] = np.array(picture.rows), np.array(picture.columns)
        arrays[f"{name}/axes"] = np.array([picture.down, picture.across])
    _write(folder / PICTURES, arrays)


def read_pictures(folder: Path) -> dict[str, WeightPicture]:
    """What a run shows of its weights, by the parameter's name. Raises as `read_mixes`."""
    with _opened(folder / PICTURES) as saved:
        names = [key.removesuffix("/end") for key in saved.files if key.endswith("/end")]
        return {name: _picture(name, saved) for name in names}


def _picture(name: str, saved: Any) -> WeightPicture:
    start, end = (np.asarray(saved[f"{name}/{when}"], dtype=np.float32) for when in ("start", "end"))
    rows, columns, (down, across) = (tuple(map(str, saved[f"{name}/{part}"])) for part in ("rows", "columns", "axes"))
    if start.shape != end.shape or end.shape != (len(rows), len(columns)):
        raise ValueError(f"{name} is {start.shape} and {end.shape} of {len(rows)} rows and {len(columns)} columns")
    return WeightPicture(start, end, rows, columns, down, across)


def _write(path: Path, arrays: Mapping[str, Any]) -> None:
    if arrays:
        with replaced(path) as file:
            np.savez(file, **arrays)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as saved:
            yield saved
    except FileNotFoundError:
        raise HeadloomError(f"'{path}' is not there: the run has none, or it was removed") from None
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise HeadloomError(f"'{path}' is damaged: {error}. Make the run again, or bring a copy back") from None
