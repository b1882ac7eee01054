"""A Ray cluster: one task for every run, retried where its worker dies, results gathered on the driver.

Runs are trained in a temporary folder of their worker, without live progress; what they leave comes back with the
result. A retried run starts afresh, which gives the same numbers. Every machine needs headloom installed.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import urlsplit

from headloom.core.errors import HeadloomError
from headloom.lab.engines.base import Engine, Listener
from headloom.lab.folder import write_bytes
from headloom.lab.work import Bundle, Failed, Job, work

if TYPE_CHECKING:
    from headloom.lab import study

Left = dict[str, bytes]
REACH_SECONDS = 5.0


class RayEngine(Engine):
    """See the module. An address is "auto", "host:port" or "ray://host:port"; None: the cluster this process is in, or
    a new one on this machine."""

    def __init__(self, bundle: Bundle, options: study.Engine, *, threads: int) -> None:
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
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._held
        if self._own:
            self._ray.shutdown()

    def run(self, jobs: Sequence[Job], listener: Listener) -> None:
        task = self._ray.remote(train_on_worker).options(
            num_cpus=self._threads, num_gpus=_gpus(jobs), max_retries=self._options.retries, name="headloom run"
        )
        waiting = {}
        for job in jobs:
            waiting[task.remote(job, self._held, self._options.timeout)] = job
            listener.started(job)
        try:
            while waiting:
                done, _ = self._ray.wait(list(waiting), num_returns=1, timeout=1.0)
                for ref in done:
                    self._settle(waiting.pop(ref), ref, listener)
        finally:
            for ref in waiting:
                self._ray.cancel(ref, force=True)

    def _settle(self, job: Job, ref: Any, listener: Listener) -> None:
        try:
            result, reason, left = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            text = " ".join(str(error).split())[:300]
            listener.failed(job, f"its Ray task failed after {self._options.retries} retries: {text}")
            return
        if job.folder is not None:
            place = Path(job.folder)
            place.mkdir(parents=True, exist_ok=True)
            # result.json comes last: where it is, the run is complete
            for name, content in sorted(left.items(), key=lambda item: item[0] == "result.json"):
                write_bytes(place / name, content)
        if reason is not None:
            listener.failed(job, reason)
        else:
            listener.done(job, result)


def train_on_worker(job: Job, bundle: Bundle, timeout: float | None) -> tuple[dict[str, Any] | None, str | None, Left]:
    """The task: (result, None, files), or (None, why it failed, files)."""
    start = time.monotonic()

    def in_time(step: int, loss: float) -> None:
        if timeout is not None and job.kind == "train" and time.monotonic() - start > timeout:
            raise Failed(f"timed out after {time.monotonic() - start:.0f} s (engine.timeout)")

    with tempfile.TemporaryDirectory(prefix="headloom-") as place:
        folder = Path(place) / "run"
        result, reason = None, None
        try:
            result = work(dataclasses.replace(job, folder=str(folder)), bundle, in_time)
        except Failed as error:
            reason = str(error)
        left = {path.name: path.read_bytes() for path in folder.glob("*") if path.is_file()}
        return result, reason, left


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
