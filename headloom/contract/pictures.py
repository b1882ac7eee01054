"""Which learned weights of a mechanism a report draws, and what their rows and columns are called."""

from __future__ import annotations

import dataclasses
from itertools import product


@dataclasses.dataclass(frozen=True)
class Picture:
    """A learned weight as a matrix with names.

    weight: the parameter's name within the module. rows, columns: what each row and column is called;
    weight.reshape(len(rows), len(columns)) is the matrix. down, across: of what these are the names, "head" say.
    """

    weight: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    down: str
    across: str


def names(*sizes: int) -> tuple[str, ...]:
    """Places along one axis, or along several that are taken together.

    >>> names(3), names(2, 2)
    (('0', '1', '2'), ('0.0', '0.1', '1.0', '1.1'))
    """
    return tuple(".".join(map(str, place)) for place in product(*(range(size) for size in sizes)))
