"""Following a run while it goes on, by the Trainer's own integrations: off unless asked for, and nothing is sent away.

tensorboard: event files in the run's folder.   trackio: its local database.   wandb: offline, in the run's folder.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from headloom.core.errors import HeadloomError, unknown

TRACKERS = ("tensorboard", "trackio", "wandb")
FOLDER = "tracking"


def check(track: str | None) -> None:
    """Refuse an unknown tracker, or one that is not installed."""
    if track is None:
        return
    if track not in TRACKERS:
        raise unknown("tracker", track, TRACKERS)
    if importlib.util.find_spec(track) is None:
        raise HeadloomError(f"--track {track} needs the package '{track}', which is not installed: pip install {track}")


@contextmanager
def environment(track: str | None, folder: Path) -> Iterator[None]:
    """Where the tracker writes, said in the variables it reads; those that the caller has set win."""
    place = str(folder / FOLDER)
    wanted = {
        "tensorboard": {"TENSORBOARD_LOGGING_DIR": place},
        "wandb": {"WANDB_MODE": "offline", "WANDB_DIR": place, "WANDB_PROJECT": "headloom"},
    }.get(track or "", {})
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    if added:
        (folder / FOLDER).mkdir(parents=True, exist_ok=True)
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
