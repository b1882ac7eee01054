"""Where jobs are done: in this process, in processes of this machine, or on a Ray cluster. No scheduler of our own."""

from headloom.lab.run.engines.base import Engine, Listener, open_engine

__all__ = ["Engine", "Listener", "open_engine"]
