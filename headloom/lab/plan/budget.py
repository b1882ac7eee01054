"""Equal budgets: a knob is turned until a variant counts what its counterpart counts.

Counts are taken from the built model on the meta device, never from a formula, so a mechanism needs no entry here:

    parameters   of the whole model, tied ones once
    flops        of a run: forward and backward (3 x forward) of the whole model, per predicted token, times the tokens
    cache        bytes one sequence of the whole context leaves behind, all layers, float32
    tokens       predicted in a run
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.lab.spec.resolved import FIELDS, Shape
from headloom.lab.spec.sizes import feed_forward

TOLERANCE = 0.005
WIDEST = 1 << 24
WORDS = {
    "parameters": "parameters",
    "flops": "training FLOPs",
    "cache": "cache bytes",
    "time": "seconds of training",
    "tokens": "training tokens",
}
TRIES = 64


@dataclass(frozen=True)
class Nearest:
    """The value of a knob that counts nearest to a target, and what it counts."""

    value: int
    count: float


def with_knob(shape: Shape, knob: str, value: int) -> Shape:
    """The shape with a knob at `value`: F, layers and steps are themselves; heads keep their width; the model's width
    counts in pairs of features a head, and the width of a head and the feed-forward's follow it."""
    if knob == "width":
        width = 2 * shape.num_heads * value
        inner = feed_forward(shape.intermediate_size, shape.hidden_size, width)
        return shape.model_copy(update={"hidden_size": width, "head_dim": 2 * value, "intermediate_size": inner})
    return shape.model_copy(update={FIELDS[knob][0]: value})


def setting(shape: Shape, knob: str) -> int:
    """The value at which `turned` gives (about) this shape."""
    found = int(getattr(shape, FIELDS[knob][0]))
    return max(1, round(found / (2 * shape.num_heads))) if knob == "width" else found


def nearest(count: Callable[[int], float], target: float, *, start: int, widest: int = WIDEST) -> Nearest:
    """The value >= 1 at which `count` is nearest to `target`.

    Args:
        count: rises with the value. Where it raises HeadloomError no model of that size can be built, and the next
            larger value is tried.
        start: a value to begin at.
    """
    known: dict[int, Nearest] = {}

    def counted(value: int) -> Nearest:
        if value not in known:
            known[value] = _first(count, value)
        return known[value]

    low, high = 1, max(2, start)
    while counted(high).count < target and high < widest:
        low, high = high, high * 2
    if counted(low).count < target:
        while high - low > 1:  # count(low) < target <= count(high)
            middle = (low + high) // 2
            if counted(middle).count < target:
                low = middle
            else:
                high = middle
    return min((counted(low), counted(high)), key=lambda found: (abs(found.count - target), found.value))


def _first(count: Callable[[int], float], value: int) -> Nearest:
    for tried in range(value, value + TRIES):
        try:
            return Nearest(tried, count(tried))
        except HeadloomError as error:
            complaint = error
    raise complaint


@dataclass(frozen=True)
class Match:
    """What a budget came to for one variant; `relative` is count / target - 1."""

    match: str
    knobs: tuple[str, ...]
    target: float
    count: float

    @property
    def relative(self) -> float:
        """How far the count is from the target, as a share of it: 0.01 is one per cent above."""
        return self.count / self.target - 1

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Match:
        """From what `to_dict` gives."""
        return cls(values["match"], tuple(values["knobs"]), values["target"], values["count"])

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        fields = {"match": self.match, "knobs": list(self.knobs), "target": self.target, "count": self.count}
        return {**fields, "relative": self.relative}


def turn_knobs(
    shape: Shape,
    knobs: Sequence[str],
    count: Callable[[Shape], float],
    target: float,
    *,
    match: str,
    label: str = "the variant",
    tolerance: float = TOLERANCE,
) -> tuple[Shape, Match]:
    """The shape, with the knobs turned one after the other, whose count is nearest to the target.

    Raises HeadloomError when the nearest reachable count is further from the target than the tolerance.
    """
    assert knobs
    for knob in knobs:
        found = nearest(_counting(shape, knob, count), target, start=setting(shape, knob))
        shape = with_knob(shape, knob, found.value)
    met = Match(match, tuple(knobs), target, found.count)
    if abs(met.relative) > tolerance:
        name = FIELDS[knob][0]
        raise HeadloomError(
            f"{label} cannot be matched to {target:,.10g} {WORDS[match]} within {tolerance:.1%}: the nearest it "
            f"reaches is {found.count:,.10g} ({met.relative:+.1%}) at {name}={getattr(shape, name)}; "
            "choose another --size, other options, another knob, or leave it out"
        )
    return shape, met


def _counting(shape: Shape, knob: str, count: Callable[[Shape], float]) -> Callable[[int], float]:
    return lambda value: count(with_knob(shape, knob, value))
