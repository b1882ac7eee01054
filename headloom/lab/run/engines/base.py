"""What an engine does: it takes jobs, and tells a listener what becomes of them."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from headloom.lab.run.work import Failed, Job


class Listener:
    """Is told what becomes of jobs, always from one thread; every method may be left as it is."""

    def started(self, job: Job) -> None:
        """A job begins, or begins again."""

    def step(self, job: Job, step: int, loss: float) -> None:
        """A training run has made `step` steps."""

    def done(self, job: Job, result: dict[str, Any]) -> None:
        """A job has ended well."""

    def failed(self, job: Job, reason: str) -> None:
        """A job has ended badly; the others go on."""


class Engine(abc.ABC):
    """A context in which jobs can be done. Raises HeadloomError on entering when it cannot be reached."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    @abc.abstractmethod
    def run(self, jobs: Sequence[Job], listener: Listener) -> None:
        """Do the jobs, as many at a time as fit; returns when all have ended, well or badly."""

    def one(self, job: Job) -> dict[str, Any]:
        """Do one job and give its result; Failed if it comes to nothing."""
        held = _One()
        self.run([job], held)
        if held.reason is not None:
            raise Failed(f"{job.name}: {held.reason}")
        return held.result


class _One(Listener):
    def __init__(self) -> None:
        self.result: dict[str, Any] = {}
        self.reason: str | None = None

    def done(self, job: Job, result: dict[str, Any]) -> None:
        self.result = result

    def failed(self, job: Job, reason: str) -> None:
        self.reason = reason
