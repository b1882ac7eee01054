"""The engine that needs nothing: jobs one after the other in this process."""

from __future__ import annotations

from collections.abc import Sequence

from headloom.lab.run.engines.base import Engine, Listener
from headloom.lab.run.work import Bundle, Failed, Job, work


class Inline(Engine):
    """In this process: for a debugger. A crash takes the study with it, and there is no timeout."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    def run(self, jobs: Sequence[Job], listener: Listener) -> None:
        """Do the jobs one after the other."""
        for job in jobs:
            listener.started(job)
            try:
                result = work(job, self._bundle, lambda step, loss, job=job: listener.step(job, step, loss))  # type: ignore[misc]
            except Failed as error:
                listener.failed(job, str(error))
            else:
                listener.done(job, result)
