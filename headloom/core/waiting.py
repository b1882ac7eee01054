"""How OpenMP's threads wait for each other.

By default a thread of GNU's OpenMP that has to wait spins, for up to about a tenth of a second. Where other programs
want the same cores, it keeps the core from the very thread it waits for, in each of the thousands of small parallel
loops of a training step: forward and backward of one small layer took 1.7 s instead of 0.08 s on two cores with a load
of ten. Headloom's own processes (its commands and the workers of its studies) spin briefly and then sleep. The numbers
that come out are the same.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

E = TypeVar("E", bound=MutableMapping[str, str])

_SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS = "1000"  # some microseconds: as long as the next loop of the same step may take to come


def wait_briefly(environment: E) -> E:
    """The environment, changed for processes that start with it (or for this one, as long as torch is not imported);
    whoever has set how threads wait keeps that."""
    if not any(name in environment for name in _SAID):
        environment["GOMP_SPINCOUNT"] = _SPINS
    return environment
