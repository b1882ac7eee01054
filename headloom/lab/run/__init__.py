"""Carrying it out: the runner, its engines and workers."""
