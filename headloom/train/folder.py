"""Preparing a run's folder (its content: `headloom.records.runs`), and finding where a stopped run continues."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.records.metrics import Line, TrainLine, read_metrics
from headloom.records.runs import CONFIG, FAILURE, METRICS, RESULT
from headloom.train import checkpoints


def prepare_folder(folder: Path, config: dict[str, Any]) -> None:
    """Prepare a run's folder. It must be new, empty, or hold this same run, whose result and failure are then removed;
    incomplete files of that run are removed too.

    Raises HeadloomError when it holds another run, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise HeadloomError(f"'{folder}' is a file, not a folder. Give the run a folder of its own.")
    folder.mkdir(parents=True, exist_ok=True)
    old = CONFIG.read_if_there(folder)
    if old is not None and old != config:
        differing = sorted(key for key in old | config if key not in old or old[key] != config.get(key))
        raise HeadloomError(
            f"'{folder}' holds another run (it differs in {', '.join(differing)}). "
            "Give another folder, or remove this one."
        )
    if old is None and any((folder / name).exists() for name in (METRICS, RESULT.name, FAILURE.name)):
        raise HeadloomError(
            f"'{folder}' holds records without a {CONFIG.name}. Give another folder, or remove this one."
        )
    for file in (RESULT, FAILURE):
        (folder / file.name).unlink(missing_ok=True)
    CONFIG.write(folder, config)
    checkpoints.remove_incomplete(folder)
    if made_before(folder)[0] is None:
        checkpoints.remove_all(folder)


def made_before(folder: Path) -> tuple[checkpoints.Checkpoint | None, list[Line]]:
    """The checkpoint from which the run continues, and the metrics up to it. A checkpoint whose metrics are incomplete
    is not used.

    Every process of a run reads this independently; the first one changes nothing that would alter the answer.
    """
    checkpoint = checkpoints.latest(folder)
    if checkpoint is not None:
        before = [line for line in read_metrics(folder) if line.step <= checkpoint.step]
        if [line.step for line in before if isinstance(line, TrainLine)] == list(range(1, checkpoint.step + 1)):
            return checkpoint, before
    return None, []
