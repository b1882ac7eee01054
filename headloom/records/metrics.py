"""metrics.jsonl: what a run measures while it goes on, one JSON object a line, flushed as it happens.

One "train" line a step; one "curve" line for each evaluation along the way and one for the last step, all on the same
part of the validation text; one "eval" line at the end, on the whole of it. tokens: predicted so far. flops: of
training so far, null where the caller did not say what a token costs. seconds: of training so far.

A file that is still being written, or was cut by a crash, may end in half a line, which is left out. The format is that
of the run's config.json.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TextIO

from pydantic import Field, TypeAdapter, ValidationError

from headloom.core.errors import HeadloomError
from headloom.core.files import write_text
from headloom.records.files import Record, complaint
from headloom.records.runs import METRICS, CurvePoint


class TrainLine(Record):
    """One optimizer step. loss: nats per token. grad_norm: before clipping."""

    kind: Literal["train"] = "train"
    step: int
    tokens: int
    flops: float | None
    seconds: float
    loss: float
    learning_rate: float
    grad_norm: float


class HeldOutLine(Record):
    """One validation: of a part of the text along the way ("curve"), or of all of it at the end ("eval").
    validation_loss: nats per token."""

    kind: Literal["curve", "eval"]
    step: int
    tokens: int
    flops: float | None
    seconds: float
    bits_per_byte: float
    validation_loss: float

    @property
    def point(self) -> CurvePoint:
        """What of it stands in result.json."""
        return CurvePoint(step=self.step, seconds=self.seconds, bits_per_byte=self.bits_per_byte)


Line = TrainLine | HeldOutLine
_LINE: TypeAdapter[Line] = TypeAdapter(Annotated[Line, Field(discriminator="kind")])


class Metrics:
    """The writer of metrics.jsonl: lines appended and flushed one by one; every line is strict JSON.

    `kept` are the lines it begins with; whatever else the file held is gone.
    """

    def __init__(self, folder: Path, kept: Sequence[Line] = ()) -> None:
        path = folder / METRICS
        if kept:
            write_text(path, "".join(_text(line) for line in kept))
        self._file: TextIO = path.open("a" if kept else "w", encoding="utf-8")

    def write(self, line: Line) -> None:
        """Append one line. Raises ValueError for NaN and infinities."""
        self._file.write(_text(line))
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; more lines are an error."""
        self._file.close()


def read_train_lines(folder: Path) -> list[TrainLine]:
    """The steps a run has made so far; none where there is no file. Raises HeadloomError for a damaged line."""
    return [line for line in _lines(folder, ("train",)) if isinstance(line, TrainLine)]


def read_curve_lines(folder: Path) -> list[HeldOutLine]:
    """The evaluations along the way so far, and that of the last step. Raises as `read_train_lines`."""
    return [line for line in _lines(folder, ("curve",)) if isinstance(line, HeldOutLine)]


def read_metrics(folder: Path) -> list[Line]:
    """All lines of a run so far. Raises as `read_train_lines`."""
    return list(_lines(folder))


def _text(line: Line) -> str:
    return json.dumps(line.to_dict(), allow_nan=False) + "\n"


def _lines(folder: Path, kinds: Collection[str] = ()) -> Iterator[Line]:
    """The lines of some kinds, or all; the others are many, and are passed over unread."""
    path = folder / METRICS
    marks = [f'"kind": "{kind}"' for kind in kinds]
    try:
        lines = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last line's end is no whole line
    except (FileNotFoundError, NotADirectoryError):
        return
    for number, line in enumerate(lines, start=1):
        if not marks or any(mark in line for mark in marks):
            try:
                yield _LINE.validate_json(line)
            except ValidationError as error:
                raise HeadloomError(f"'{path}', line {number}, {complaint(error)}") from None
