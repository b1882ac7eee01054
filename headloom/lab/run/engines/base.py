"""What an engine does, and the one that needs nothing: jobs one after the other in this process."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from headloom.lab.run.work import Bundle, Failed, Job, work

if TYPE_CHECKING:
    from headloom.lab.spec import study


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


class Inline(Engine):
    """In this process: for a debugger. A crash takes the study with it, and there is no timeout."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def run(self, jobs: Sequence[Job], listener: Listener) -> None:
        for job in jobs:
            listener.started(job)
            try:
                result = work(job, self._bundle, lambda step, loss, job=job: listener.step(job, step, loss))  # type: ignore[misc]
            except Failed as error:
                listener.failed(job, str(error))
            else:
                listener.done(job, result)


def open_engine(options: study.Engine, bundle: Bundle, *, threads: int) -> Engine:
    """The engine of that name."""
    if options.name == "inline":
        return Inline(bundle)
    if options.name == "ray":
        from headloom.lab.run.engines.cluster import RayEngine

        return RayEngine(bundle, options, threads=threads)
    from headloom.lab.run.engines.local import Local

    return Local(bundle, workers=options.workers, threads=threads, timeout=options.timeout)
