"""Checkpoints of a run. They are complete or absent, so a run that was killed continues to the same numbers.

The Trainer writes checkpoint-N/ file by file (weights, AdamW, schedule, random states, its own step). When all files
are on the disk, the folder is marked (complete.json) and renamed to step-N/; then older ones are removed. An incomplete
checkpoint-N/ that a killed run left is removed when the run continues. The position in the data follows from the step,
because rows are a function of (seed, position). Losses and seconds are read from metrics.jsonl, which is flushed to the
disk before the checkpoint is marked.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from headloom.records.metrics import Metrics
from headloom.records.runs import CHECKPOINTS, MARK, CheckpointMark
from headloom.train import sharding


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder, its step, how often each score path had run until then, and whether FSDP wrote
    it (FSDP uses its own file format)."""

    path: Path
    step: int
    score_paths: Mapping[str, int]
    sharded: bool


def latest(folder: Path) -> Checkpoint | None:
    """The last complete checkpoint of a run's folder."""
    found = []
    for path in (folder / CHECKPOINTS).glob("step-*"):
        mark = MARK.read_if_there(path)
        if mark is not None:
            found.append(Checkpoint(path, mark.step, mark.score_paths, mark.sharded))
    return max(found, key=lambda checkpoint: checkpoint.step, default=None)


def remove_incomplete(folder: Path) -> None:
    """Remove checkpoints that a killed run did not complete."""
    for path in (folder / CHECKPOINTS).glob("*"):
        if not (path.name.startswith("step-") and MARK.is_in(path)):
            shutil.rmtree(path, ignore_errors=True)


def remove_all(folder: Path) -> None:
    """Remove all checkpoints: a finished run does not need them."""
    shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)


class Checkpoints(TrainerCallback):
    """Asks the Trainer for a checkpoint every `seconds` (0: after every step), and marks it when it is complete."""

    def __init__(
        self,
        folder: Path,
        *,
        seconds: float,
        metrics: Metrics | None,
        score_paths: Mapping[str, int],
        on_sealed: Callable[[], None],
    ) -> None:
        self._folder, self._seconds, self._metrics = folder / CHECKPOINTS, seconds, metrics
        self._paths, self._on_sealed = score_paths, on_sealed
        self._last = time.monotonic()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Decide whether a checkpoint is due. With several processes, the clock of the first one decides for all."""
        due = time.monotonic() - self._last >= self._seconds and state.global_step < state.max_steps
        if args.world_size > 1:
            said = torch.tensor([due], device=args.device, dtype=torch.int32)
            torch.distributed.broadcast(said, 0)
            due = bool(said.item())
        if due:
            control.should_save = True

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Flush everything to the disk, mark the checkpoint, rename it, and then remove the older ones."""
        if args.world_size > 1:
            torch.distributed.barrier()  # every process has written its random state
        if state.is_world_process_zero:
            assert self._metrics is not None
            self._metrics.sync()
            written = self._folder / f"checkpoint-{state.global_step}"
            sync_tree(written)
            MARK.write(
                written,
                CheckpointMark(step=state.global_step, score_paths=dict(self._paths), sharded=sharding.asked_for()),
            )
            sealed = self._folder / f"step-{state.global_step}"
            written.rename(sealed)
            sync(self._folder)
            for older in self._folder.glob("step-*"):
                if older != sealed:
                    shutil.rmtree(older, ignore_errors=True)
        self._last = time.monotonic()
        self._on_sealed()


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk. Windows can wait for files only."""
    windows = sys.platform == "win32"
    if windows and path.is_dir():
        return
    handle = os.open(path, os.O_RDWR if windows else os.O_RDONLY)  # there, what is only read cannot be waited for
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_tree(folder: Path) -> None:
    """Wait until all files below a folder, and the folder itself, are on the disk."""
    for path in sorted(folder.rglob("*"), reverse=True):
        sync(path)
    sync(folder)
