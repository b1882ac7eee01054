"""Equal parameters: the feed-forward width F is turned until a variant counts what the reference counts.

The count is taken from the built model on the meta device, never from a formula, so a mechanism needs no entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headloom.core.errors import HeadloomError

TOLERANCE = 0.005
WIDEST = 1 << 24


@dataclass(frozen=True)
class Match:
    """The width that was found and what it counts; `relative` is parameters / target - 1."""

    intermediate_size: int
    parameters: int
    relative: float


def match_parameters(
    count: Callable[[int], int], target: int, *, start: int, label: str = "the variant", tolerance: float = TOLERANCE
) -> Match:
    """The feed-forward width F >= 1 at which `count(F)` is nearest to `target`.

    Args:
        count: parameters of the whole model with feed-forward width F; rises with F.
        target: the reference's parameters.
        start: a width to begin at (the size's own).
        label, tolerance: for the error, and the relative difference that is still equal.

    Raises HeadloomError when the nearest reachable count is further from the target than the tolerance.
    """
    known: dict[int, int] = {}

    def counted(width: int) -> int:
        if width not in known:
            known[width] = count(width)
        return known[width]

    low, high = 1, max(2, start)
    while counted(high) < target and high < WIDEST:
        low, high = high, high * 2
    if counted(low) < target:
        while high - low > 1:  # count(low) < target <= count(high)
            middle = (low + high) // 2
            if counted(middle) < target:
                low = middle
            else:
                high = middle
    best = min((low, high), key=lambda width: (abs(counted(width) - target), width))
    relative = counted(best) / target - 1
    if abs(relative) > tolerance:
        raise HeadloomError(
            f"{label} cannot be matched to {target:,} parameters within {tolerance:.1%}: the nearest it reaches is "
            f"{counted(best):,} ({relative:+.1%}) at intermediate_size={best}; "
            "choose another --size, other options, or leave it out"
        )
    return Match(best, counted(best), relative)
