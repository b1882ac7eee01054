"""A Ray cluster: one task for every run, retried where its worker dies, results gathered on the driver.

Runs are trained in a temporary folder of their worker; what they leave comes back with the result. While they go on
they tell a small actor (the board) how far they are, and the driver looks there: for progress, and for runs that take
too long, which end themselves at their next step or, where they hang, are killed. Without the board (its machine died)
a study goes on unseen. A retried run starts afresh, which gives the same numbers. Every machine needs headloom.
"""

from __future__ import annotations

import dataclasses
import math
import os
import socket
import tempfile
import time
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from headloom.core.errors import HeadloomError
from headloom.core.files import write_bytes
from headloom.lab.run.engines.base import Engine, Listener
from headloom.lab.run.work import Bundle, Failed, Job, work
from headloom.records.runs import RESULT

if TYPE_CHECKING:
    from headloom.lab.spec.study import EngineOptions

Left = dict[str, bytes]
Said = tuple[str, int, float]
REACH_SECONDS = 5.0
LOOK_SECONDS = 0.5
GRACE_SECONDS = 10.0


class RayEngine(Engine):
    """See the module. An address is "auto", "host:port" or "ray://host:port"; None: the cluster this process is in, or
    a new one on this machine."""

    def __init__(self, bundle: Bundle, options: EngineOptions, *, threads: int) -> None:
        self._bundle, self._options, self._threads = bundle, options, threads
        try:
            import ray
        except ImportError:
            raise HeadloomError(
                "engine ray needs the package 'ray', which is not installed: pip install 'headloom[ray]'"
            ) from None
        self._ray: Any = ray
        self._own = False

    def __enter__(self) -> Self:
        address = self._options.address
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if not (self._ray.is_initialized() and address is None):
            _reach(address)
            try:
                local = {} if address else {"num_cpus": self._options.workers, "include_dashboard": False}
                self._ray.init(address=address, log_to_driver=False, logging_level="error", **local)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise _unreachable(address, " ".join(str(error).split())[:300]) from None
            self._own = True
        self._held = self._ray.put(self._bundle)
        self._board = self._ray.remote(Board).options(num_cpus=0).remote()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.kill(self._board)
        del self._held, self._board
        if self._own:
            self._ray.shutdown()

    def run(self, jobs: Sequence[Job], listener: Listener) -> None:
        """Do the jobs, each as a task of the cluster."""
        calls = int(self._options.track == "trackio")  # whose folder is its process's: then a new one for every run
        task = self._ray.remote(max_calls=calls)(train_on_worker).options(
            num_cpus=self._threads,
            num_gpus=_gpus(jobs),
            max_retries=self._options.retries,
            name="headloom run",
        )
        waiting = {task.remote(job, self._held, self._board, self._options.timeout): _Seen(job) for job in jobs}
        said = self._board.read.remote()
        try:
            while waiting:
                done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=LOOK_SECONDS)
                for ref in done:
                    self._settle(waiting.pop(ref), ref, listener)
                if self._ray.wait([said], timeout=0)[0]:
                    self._look(said, waiting.values(), listener)
                    said = self._board.read.remote()
                for ref, seen in waiting.items():
                    if seen.is_late(self._options.timeout):
                        self._ray.cancel(ref, force=True)
        finally:
            for ref in waiting:
                self._ray.cancel(ref, force=True)

    def _look(self, ref: Any, waiting: Iterable[_Seen], listener: Listener) -> None:
        """Pass on what the runs have said."""
        try:
            said: dict[str, Said] = self._ray.get(ref)
        except self._ray.exceptions.RayError:
            return
        for seen in waiting:
            if seen.job.name in said:
                seen.hear(said[seen.job.name], listener)

    def _settle(self, seen: _Seen, ref: Any, listener: Listener) -> None:
        job = seen.job
        try:
            result, reason, left, last = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            seen.begin(listener)
            text = " ".join(str(error).split())[:300]
            if seen.late:
                listener.failed(job, f"timed out after {time.monotonic() - seen.since:.0f} s (engine.timeout)")
            else:
                listener.failed(job, f"its Ray task failed after {self._options.retries} retries: {text}")
            return
        seen.hear(last, listener)
        if job.folder is not None:
            place = Path(job.folder)
            place.mkdir(parents=True, exist_ok=True)
            # the result comes last: where it is, the run is complete
            for name, content in sorted(left.items(), key=lambda item: item[0] == RESULT.name):
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                write_bytes(place / name, content)
        if reason is not None:
            listener.failed(job, reason)
        else:
            listener.done(job, result)


class Board:
    """The actor: what every run said last, and in which attempt."""

    def __init__(self) -> None:
        self._said: dict[str, Said] = {}

    def tell(self, name: str, said: Said) -> None:
        """Note what a run says."""
        self._said[name] = said

    def read(self) -> dict[str, Said]:
        """What every run said last."""
        return self._said


class _Seen:
    """What the driver knows of a job: since when this attempt goes on, and how far it is."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.since = time.monotonic()
        self.late = False
        self._attempt: str | None = None
        self._step = 0

    def begin(self, listener: Listener, attempt: str = "") -> None:
        if self._attempt is None or (attempt and attempt != self._attempt):
            self._attempt, self._step, self.since = attempt, 0, time.monotonic()
            listener.started(self.job)

    def hear(self, said: Said, listener: Listener) -> None:
        attempt, step, loss = said
        self.begin(listener, attempt)
        if step > self._step:
            self._step = step
            listener.step(self.job, step, loss)

    def is_late(self, timeout: float | None) -> bool:
        """Whether it is to be killed, which is said once."""
        if timeout is None or self.late or self._attempt is None or self.job.kind != "train":
            return False
        self.late = time.monotonic() - self.since > timeout + GRACE_SECONDS
        return self.late


def train_on_worker(
    job: Job, bundle: Bundle, board: Any, timeout: float | None
) -> tuple[dict[str, Any] | None, str | None, Left, Said]:
    """The task: (result, None, files, last words), or (None, why it failed, files, last words)."""
    import headloom.train.run  # noqa: F401  # seconds of imports, before the clock starts
    from headloom.core.heap import keep_freed
    from headloom.records.runs import CHECKPOINTS

    keep_freed()
    start, attempt = time.monotonic(), uuid.uuid4().hex
    told, last = -math.inf, (attempt, 0, math.nan)
    board.tell.remote(job.name, last)

    def on_step(step: int, loss: float) -> None:
        nonlocal told, last
        last, now = (attempt, step, loss), time.monotonic()
        if now - told > LOOK_SECONDS:
            told = now
            board.tell.remote(job.name, last)
        if timeout is not None and job.kind == "train" and now - start > timeout:
            raise Failed(f"timed out after {now - start:.0f} s (engine.timeout)")

    with tempfile.TemporaryDirectory(prefix="headloom-") as place:
        folder = Path(place) / "run"
        result, reason = None, None
        try:
            result = work(dataclasses.replace(job, folder=str(folder)), bundle, on_step)
        except Failed as error:
            reason = str(error)
        left = {
            str(path.relative_to(folder)): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file() and not path.is_relative_to(folder / CHECKPOINTS)
        }
        return result, reason, left, last


def _gpus(jobs: Sequence[Job]) -> int:
    """One for each task where runs use one."""
    runs = [run for job in jobs for run in (job.settings.get("run"), *job.settings.get("runs", {}).values()) if run]
    return int(any(run["device"] == "cuda" for run in runs))


def _reach(address: str | None) -> None:
    """Knock before Ray does: it would knock for a minute."""
    if address is None or address == "auto":
        return
    parts = urlsplit(address if "//" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or port is None:
        raise HeadloomError(f"a Ray address must look like host:port, ray://host:port or auto, not '{address}'")
    try:
        socket.create_connection((host, port), timeout=REACH_SECONDS).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from None


def _unreachable(address: str | None, why: str) -> HeadloomError:
    where = f"the Ray cluster at '{address}'" if address else "a Ray cluster on this machine"
    return HeadloomError(f"{where} cannot be reached ({why}): start it (ray start --head), or use --engine local")
