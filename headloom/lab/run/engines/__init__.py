"""Where jobs are done: in this process, in processes of this machine, or on a Ray cluster. No scheduler of our own."""

from __future__ import annotations

from headloom.lab.run.engines.base import Engine, Listener
from headloom.lab.run.work import Bundle
from headloom.lab.spec.study import EngineOptions

__all__ = ["Engine", "Listener", "open_engine"]


def open_engine(options: EngineOptions, bundle: Bundle, *, threads: int) -> Engine:
    """The engine of that name, to be entered. threads: processor threads of a run."""
    if options.name == "inline":
        from headloom.lab.run.engines.inline import Inline

        return Inline(bundle)
    if options.name == "ray":
        from headloom.lab.run.engines.cluster import RayEngine

        return RayEngine(bundle, options, threads=threads)
    from headloom.lab.run.engines.local import Local

    return Local(bundle, workers=options.workers, threads=threads, timeout=options.timeout)
