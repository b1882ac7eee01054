"""Following a run while it is trained, with the Trainer's own integrations. Off by default; no data leaves the machine.

All three write to tracking/ in the run's folder: tensorboard event files, trackio a database with one run, wandb an
offline run, which `wandb sync` would upload.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError, unknown
from headloom.records.runs import TRACKING

TRACKERS = ("tensorboard", "trackio", "wandb")


def check_tracker(track: str | None) -> None:
    """Raise HeadloomError for an unknown tracker and for one that is not installed."""
    if track is None:
        return
    if track not in TRACKERS:
        raise unknown("tracker", track, TRACKERS)
    if importlib.util.find_spec(track) is None:
        raise HeadloomError(f"--track {track} needs the package '{track}', which is not installed: pip install {track}")


def check(track: str | None, folder: Path) -> None:
    """Raise HeadloomError for a tracker that is unknown, is not installed, or would write to another folder."""
    check_tracker(track)
    if track == "trackio" and "TRACKIO_DIR" not in os.environ and "trackio" in sys.modules:
        bound = Path(sys.modules["trackio"].TRACKIO_DIR)
        if bound != _place(folder):
            raise HeadloomError(
                f"trackio chose its folder when it was imported, and it is '{bound}': train this run in a process of "
                "its own, or set TRACKIO_DIR before the first one to have all runs of a process in one place"
            )


@contextmanager
def environment(track: str | None, folder: Path) -> Iterator[None]:
    """Set the environment variables that tell the tracker where to write. Variables that the caller has set are kept.

    The tracker is closed at the end, also if the run fails, because the process may end right after.
    """
    place = str(_place(folder))
    wanted = {
        "tensorboard": {"TENSORBOARD_LOGGING_DIR": place},
        "trackio": {"TRACKIO_DIR": place},
        "wandb": {
            "WANDB_MODE": "offline",
            "WANDB_ERROR_REPORTING": "false",
            "WANDB_DIR": place,
            "WANDB_CACHE_DIR": place,
            "WANDB_PROJECT": "headloom",
        },
    }.get(track or "", {})
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    if added:
        (folder / TRACKING).mkdir(parents=True, exist_ok=True)
    os.environ.update(added)
    before, status = _open_run(track), 1
    try:
        yield
        status = 0
    finally:
        if before is None and _open_run(track) is not None:
            _close(str(track), status)
        for name in added:
            os.environ.pop(name, None)


def _close(track: str, status: int) -> None:
    tracker = sys.modules[track]
    if track == "wandb":
        tracker.finish(exit_code=status)
        tracker.teardown()  # otherwise the next run of this process would be written to this run's folder
    else:
        tracker.finish()


def _place(folder: Path) -> Path:
    return (folder / TRACKING).absolute()


def _open_run(track: str | None) -> Any:
    """The tracker's open run, if there is one."""
    tracker = sys.modules.get(track or "")
    if track == "wandb" and tracker is not None:
        return tracker.run
    if track == "trackio" and tracker is not None:
        return tracker.context_vars.current_run.get()
    return None
