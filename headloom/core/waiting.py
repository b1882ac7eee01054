"""How OpenMP's threads wait for each other.

By default a waiting thread of GNU's OpenMP keeps its core busy for up to about 0.1 s. When other programs use the same
cores, it may occupy the core that the awaited thread needs. A training step has thousands of small parallel loops, so
this adds up: forward and backward of one small layer took 1.7 s instead of 0.08 s on two cores with a load of ten.
Headloom's own processes (its commands and the workers of its studies) therefore wait actively for a short time only and
then sleep. The numerical results are the same.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import TypeVar

E = TypeVar("E", bound=MutableMapping[str, str])

_SAID = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS = "1000"  # a few microseconds: about the time until the next parallel loop of the same step


def wait_briefly(environment: E) -> E:
    """Set the short waiting time in an environment, and return the environment. It holds for processes that are started
    with it, and for this one if torch is not imported yet. A waiting policy that is already set is kept."""
    if not any(name in environment for name in _SAID):
        environment["GOMP_SPINCOUNT"] = _SPINS
    return environment
