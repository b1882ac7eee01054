"""What a run leaves in its folder, and how it is written so that it can be read at any moment.

config.json     the resolved configuration           metrics.jsonl   one JSON object a line, flushed as it happens
result.json     there if and only if the run is complete             failure.json   why it stopped, if it did
mixes.npz       the learned mixes after training, by the parameter's name; absent where there are none
pictures.npz    what a report shows of the weights, before and after training (headloom.train.weights); likewise
checkpoints/    while it runs: what it goes on from after a kill     tracking/      what --track writes

Lines of metrics.jsonl: one "train" a step; one "curve" for each evaluation along the way and one for the last step, all
on the same part of the validation text; one "eval" at the end, on the whole of it:
    {"kind": "train", "step", "tokens", "flops", "seconds", "loss", "learning_rate", "grad_norm"}
    {"kind": "curve" or "eval", "step", "tokens", "flops", "seconds", "bits_per_byte", "validation_loss"}
tokens: predicted so far. flops: of training so far, null where the caller did not say what a token costs. seconds: of
training so far. loss: nats per token.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, TextIO

import psutil
from pydantic import BaseModel, ConfigDict

from headloom.core.errors import HeadloomError
from headloom.core.files import read_json, write_json, write_text
from headloom.core.heap import freed_memory
from headloom.core.machine import cores

CONFIG, METRICS, RESULT, FAILURE = "config.json", "metrics.jsonl", "result.json", "failure.json"
MIXES, PICTURES = "mixes.npz", "pictures.npz"


class CurvePoint(BaseModel):
    """Held-out quality after `step` steps and `seconds` of training, on the part of the text read along the way."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: int
    seconds: float
    bits_per_byte: float

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> CurvePoint:
        """From a line of metrics.jsonl."""
        return cls(**{name: record[name] for name in cls.model_fields})


class RunResult(BaseModel):
    """The outcome of a complete run (result.json).

    Attributes:
        bits_per_byte, validation_loss (nats per token), perplexity, validation_tokens, validation_bytes: at the end,
        on the validation split.
        validation_text: the rules of that measurement in one line.
        notes: what people should know about the data before they trust a number; mostly empty.
        curve: held-out quality along the way and at the end; empty where none was asked for. curve_text: its rules.
        selection_bits_per_byte: on the split that learning rates are chosen by, None where there is none.
        weights: SHA-256 of the trained weights.
        parameters: trainable numbers, tied ones once. train_loss: of the last step. tokens: predicted in training.
        train_seconds: training alone, without validation, records and callbacks. eval_seconds: of the one at the end.
        step_time_seconds: median wall time of a step without the first `warm_steps`, with the quartiles beside it.
        tokens_per_second: predicted tokens of a step / step_time_seconds.
        score_paths: how often each score path ran ("fused", "blocks").
        no_decay_parameters: numbers without weight decay (norms, biases, mixes).
        versions, machine: of what it ran on; neither host names nor paths.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    seed: int
    steps: int
    bits_per_byte: float
    validation_loss: float
    perplexity: float | None
    validation_tokens: int
    validation_bytes: int
    validation_text: str
    notes: tuple[str, ...] = ()
    curve: tuple[CurvePoint, ...] = ()
    curve_text: str = ""
    selection_bits_per_byte: float | None
    weights: str
    parameters: int
    no_decay_parameters: int
    train_loss: float
    tokens: int
    train_seconds: float
    eval_seconds: float
    step_time_seconds: float
    step_time_low: float
    step_time_high: float
    warm_steps: int
    tokens_per_second: float
    score_paths: dict[str, int]
    fingerprint: str
    versions: dict[str, str]
    machine: dict[str, str | int | float]

    @classmethod
    def read(cls, folder: str | Path) -> RunResult:
        """The result in a run's folder. Raises HeadloomError when the run is not complete."""
        path = Path(folder) / RESULT
        if not path.is_file():
            raise HeadloomError(
                f"'{folder}' holds no complete run: there is no {RESULT}. Train it first, or see {FAILURE} there."
            )
        return cls.model_validate_json(path.read_text(encoding="utf-8"))

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return self.model_dump(mode="json")


class Metrics:
    """metrics.jsonl: lines appended and flushed one by one; every line is strict JSON.

    `kept` are the records it begins with; whatever else the file held is gone.
    """

    def __init__(self, path: Path, kept: Sequence[dict[str, Any]] = ()) -> None:
        if kept:
            write_text(path, "".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
        self._file: TextIO = path.open("a" if kept else "w", encoding="utf-8")

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Wait until all lines are on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; more lines are an error."""
        self._file.close()


def read_metrics(folder: str | Path) -> list[dict[str, Any]]:
    """All whole lines of a run's metrics; a last line that was cut by a crash is left out."""
    lines = (Path(folder) / METRICS).read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def open_folder(folder: Path, config: dict[str, Any]) -> None:
    """Make a run's folder ready: new or empty, or one that holds this very run, whose result and failure are removed.

    Raises HeadloomError when it holds another run, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadloomError(f"'{folder}' is a file, not a folder. Give the run a folder of its own.")
    folder.mkdir(parents=True, exist_ok=True)
    before = folder / CONFIG
    if before.is_file():
        old = read_json(before)
        if old != config:
            differing = sorted(key for key in config if old is None or old.get(key) != config[key])
            raise HeadloomError(
                f"'{folder}' holds another run (it differs in {', '.join(differing) or 'its fields'}). "
                "Give another folder, or remove this one."
            )
    elif any((folder / name).exists() for name in (METRICS, RESULT, FAILURE)):
        raise HeadloomError(f"'{folder}' holds records without a {CONFIG}. Give another folder, or remove this one.")
    for name in (RESULT, FAILURE):
        (folder / name).unlink(missing_ok=True)
    write_json(before, config)


def world_size() -> int:
    """How many processes make this run together (torchrun, accelerate launch)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def versions() -> dict[str, str]:
    """Versions of what decides the numbers."""
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "accelerate", "tokenizers", "numpy", "headloom"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def machine() -> dict[str, str | int | float]:
    """Processor, cores, memory in GiB and operating system."""
    return {
        "processor": _processor(),
        "architecture": platform.machine(),
        "cores": cores(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
    }


def ran_on(accelerator: str | None = None, *, sharded: bool = False) -> dict[str, str | int | float]:
    """The machine and how this process uses it: what becomes of freed memory where that is known, the accelerator if
    one was used, how many processes share the work if several do, and whether they share the weights too."""
    about = machine()
    if freed := freed_memory():
        about["freed_memory"] = freed
    if world_size() > 1:
        about["processes"] = world_size()
    if sharded:
        about["sharding"] = "FSDP"
    if accelerator:
        about["accelerator"] = accelerator
    return about


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
