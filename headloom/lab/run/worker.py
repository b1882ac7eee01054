"""A worker of the local engine: `python -m headloom.lab.run.worker BUNDLE`. It imports once, and forks for every run.

    BUNDLE   the number of an open file that holds what all runs share
    stdin    a job a line (JSON)
    stdout   {"ready"} | {"pid"} | {"step", "loss"} | {"done": result} | {"failed": reason} | {"ended": wait status}

A run that crashes takes only its own process with it. When stdin ends, because the study is over or was killed, every
process here ends without a word: nobody trains for a study that is gone. A run whose worker was killed ends too.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import pickle
import select
import sys
import threading
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any


def serve(bundle_file: str) -> None:
    """Serve jobs until stdin ends."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is no message
    import headloom.train.run  # noqa: F401  # seconds of imports, before the forks
    from headloom.core.heap import keep_freed
    from headloom.lab.run.work import Job

    keep_freed()

    with mmap.mmap(int(bundle_file), 0, access=mmap.ACCESS_READ) as file:
        bundle = pickle.loads(file)
    _tell(channel, {"ready": os.getpid()})
    while line := _line():
        job = Job(**json.loads(line))
        own = os.getpid()
        pid = os.fork()
        if pid == 0:
            _child(job, bundle, channel, own)
        _tell(channel, {"pid": pid})
        _, status = os.waitpid(pid, 0)
        _tell(channel, {"ended": status})


def _line() -> bytes:
    """A line of stdin, and no more: the child watches what follows."""
    found = b""
    while not found.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        found += byte
    return found


def _child(job: Any, bundle: Any, channel: IO[str], parent: int) -> None:
    from headloom.core.locks import locked
    from headloom.lab.run.work import Failed, work
    from headloom.records.runs import LOG

    status, hold = 1, ExitStack()
    try:
        threading.Thread(target=_watch, args=[parent], daemon=True).start()
        if job.folder is not None:
            # a run of a study that was just killed may be a moment from its end
            hold.enter_context(locked(Path(job.folder), wait=True))
            log = os.open(Path(job.folder) / LOG, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
        faulthandler.enable()
        try:
            result = work(job, bundle, lambda step, loss: _tell(channel, {"step": step, "loss": loss}))
            _tell(channel, {"done": result})
        except Failed as error:
            _tell(channel, {"failed": str(error)})
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        with suppress(OSError):  # on a full disk; whatever happens, this process ends here
            hold.close()
            sys.stderr.flush()
        os._exit(status)


def _watch(parent: int) -> None:
    """End the run when the study is gone, and within a second when the worker is: while a run lives, the study hears
    nothing of its worker's end."""
    while os.getppid() == parent:
        ready, _, _ = select.select([0], [], [], 1.0)
        if ready and not os.read(0, 1):
            break
    os._exit(1)


def _tell(channel: IO[str], message: dict[str, Any]) -> None:
    try:
        channel.write(json.dumps(message) + "\n")
        channel.flush()
    except BrokenPipeError:  # the study is gone
        os._exit(1)


if __name__ == "__main__":
    serve(sys.argv[1])
