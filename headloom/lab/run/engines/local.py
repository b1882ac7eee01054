"""Processes of this machine: warm workers that fork one process for every run (see headloom.lab.run.worker)."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headloom.core.errors import HeadloomError
from headloom.core.files import saying_when_full
from headloom.core.machine import cores
from headloom.core.waiting import wait_briefly
from headloom.lab.run.engines.base import Engine, Listener
from headloom.lab.run.work import Bundle, Job

WORKER = ("-m", "headloom.lab.run.worker")


class Local(Engine):
    """`workers` at a time (None: cores / threads, or one for each GPU). timeout: seconds a training run may take."""

    def __init__(self, bundle: Bundle, *, workers: int | None, threads: int, timeout: float | None = None) -> None:
        self._bundle, self._threads, self._timeout = bundle, threads, timeout
        self._gpus = _gpus()
        self._most = workers or self._gpus or max(1, cores() // threads)
        self._slots: list[_Slot] = []

    def __enter__(self) -> Self:
        # a file without a name: whatever kills this process, nothing is left behind
        self._file = tempfile.TemporaryFile(prefix="headloom-")
        with saying_when_full(Path(tempfile.gettempdir()), "no run was started"):
            pickle.dump(self._bundle, self._file, protocol=5)
            self._file.flush()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for slot in self._slots:
            slot.close()
        self._file.close()

    def run(self, jobs: Sequence[Job], listener: Listener) -> None:
        """Do the jobs, each in a process of its own; returns when all have ended."""
        waiting = deque(jobs)
        while len(self._slots) < min(self._most, len(jobs)):
            gpu = len(self._slots) % self._gpus if self._gpus else None
            self._slots.append(_Slot(self._file.fileno(), self._threads, gpu))
        with selectors.DefaultSelector() as selector:
            for slot in self._slots:
                selector.register(slot.output, selectors.EVENT_READ, slot)
            while waiting or any(slot.job for slot in self._slots):
                for slot in self._slots:
                    if slot.job is None and waiting:
                        slot.give(waiting.popleft())
                for key, _ in selector.select(timeout=0.5):
                    slot = key.data
                    alive = slot.read(listener)
                    if not alive:  # the worker itself was killed: another one takes its place
                        selector.unregister(slot.output)
                        slot.restart()
                        selector.register(slot.output, selectors.EVENT_READ, slot)
                for slot in self._slots:
                    slot.check(self._timeout)


class _Slot:
    """One worker: what it does, and what it says."""

    def __init__(self, bundle: int, threads: int, gpu: int | None) -> None:
        self._bundle, self._arguments = bundle, [sys.executable, *WORKER, str(bundle)]
        above = str(Path(str(files("headloom"))).parent)
        paths = dict.fromkeys([above, *filter(None, sys.path)])  # a user's mechanism is imported as here
        own = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join(paths)}
        self._environment = wait_briefly({**os.environ, **own})
        if gpu is not None:
            visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            self._environment["CUDA_VISIBLE_DEVICES"] = visible[gpu] if visible != [""] else str(gpu)
        self.job: Job | None = None
        self._starts = 0
        self._start()

    def _start(self) -> None:
        self._starts += 1
        self._process = subprocess.Popen(
            self._arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            pass_fds=[self._bundle],
            start_new_session=True,  # Ctrl-C is for the study, which then lets go of its workers
        )
        assert self._process.stdout is not None
        self.output = self._process.stdout
        self._rest = b""
        self._ready = False
        self._pid: int | None = None
        self._outcome: tuple[str, Any] | None = None
        self._late = False
        self._since = time.monotonic()

    def give(self, job: Job) -> None:
        """Hand over a job."""
        assert self.job is None and self._process.stdin is not None
        self.job, self._outcome, self._late, self._told = job, None, False, False
        self._since = time.monotonic()
        with contextlib.suppress(OSError):  # it is gone; reading will say so
            self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
            self._process.stdin.flush()

    def read(self, listener: Listener) -> bool:
        """Pass on what the worker has said; False when it is gone."""
        said = os.read(self.output.fileno(), 1 << 16)
        *lines, self._rest = (self._rest + said).split(b"\n")
        for line in lines:
            self._hear(json.loads(line), listener)
        if said:
            return True
        self._process.wait()
        if self._pid is not None:  # its run may have outlived it
            _kill(self._pid)
        if self.job is not None:
            how = _ended(self._process.returncode)
            if not self._ready and self._starts > 1:
                raise HeadloomError(
                    f"workers do not start ({how}): see what python -m headloom.lab.run.worker says about it"
                )
            job, self.job = self.job, None
            listener.failed(job, f"its worker process {how}")
        return False

    def _hear(self, message: dict[str, Any], listener: Listener) -> None:
        job = self.job
        if "ready" in message:
            self._ready, self._since = True, time.monotonic()
        elif "pid" in message and job is not None:
            self._pid, self._since = message["pid"], time.monotonic()
            listener.started(job)
        elif "step" in message and job is not None:
            listener.step(job, message["step"], message["loss"])
        elif "done" in message or "failed" in message:
            self._outcome = next(iter(message.items()))
        elif "ended" in message and job is not None:
            self.job, self._pid = None, None
            self._settle(job, os.waitstatus_to_exitcode(message["ended"]), listener)

    def _settle(self, job: Job, code: int, listener: Listener) -> None:
        if self._outcome is not None and self._outcome[0] == "done":
            listener.done(job, self._outcome[1])
        elif self._outcome is not None:
            listener.failed(job, self._outcome[1])
        elif self._late:
            listener.failed(job, f"timed out after {time.monotonic() - self._since:.0f} s (engine.timeout)")
        else:
            listener.failed(job, f"its process {_ended(code)}")

    def check(self, timeout: float | None) -> None:
        """Kill a training run that takes too long."""
        if timeout is None or self.job is None or self.job.kind != "train" or self._pid is None or self._late:
            return
        if time.monotonic() - self._since > timeout:
            self._late = True
            _kill(self._pid)

    def restart(self) -> None:
        """Another worker in its place."""
        self._let_go()
        if self._ready:
            self._starts = 0
        self._start()

    def _let_go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self.output.close()

    def close(self) -> None:
        """Let go: the worker ends when its stdin does, and so does what it runs."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._pid is not None:
            _kill(self._pid)
        self._let_go()


def _ended(code: int) -> str:
    if code >= 0:
        return f"ended with status {code} (its log.txt says more)"
    name = signal.Signals(-code).name
    hint = ", as the system does when memory runs out" if -code == signal.SIGKILL else " (its log.txt says more)"
    return f"was killed by {name}{hint}"


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
