"""The closed form of what a mechanism remembers, read off its own `cache_slots`: sizes that remember their letters."""

from __future__ import annotations

import copy
import itertools
import math
import re
from fractions import Fraction
from typing import Any

import torch

from headloom.core.config import meanings, own_first
from headloom.mechanism import AttentionConfig, MechanismInfo, build_from_config

LETTER = re.compile(r"^([A-Z]\w{0,3}): ")
"""How the meaning of a size begins: with its letter in formulas, "H: the number of heads"."""
SAME = (("num_kv_heads", "num_heads"), ("value_dim", "head_dim"))
"""Where the first equals the second by default, it has the second's letter."""


Letter = tuple[int, str]
"""A letter after its place in products: those of a mechanism's own options, of its base's, of all mechanisms'."""


class SymbolicSize(int):
    """An int that is a polynomial in letters; `terms` maps a product of letters to its coefficient.

    >>> G, K = SymbolicSize.named(2, "G"), SymbolicSize.named(10, "K")
    >>> both = G * K + 3 * (K * G) + G // 2 * K * K
    >>> both, str(both)
    (180, '4 G K + 1/2 G K^2')
    """

    terms: dict[tuple[Letter, ...], Fraction]

    @classmethod
    def of(cls, value: int, terms: dict[tuple[Letter, ...], Fraction]) -> SymbolicSize:
        made = cls(value)
        made.terms = terms
        return made

    @classmethod
    def named(cls, value: int, letter: str, place: int = 0) -> SymbolicSize:
        return cls.of(value, {((place, letter),): Fraction(1)})

    def __add__(self, other: int) -> SymbolicSize:
        terms = dict(self.terms)
        for letters, factor in _terms(other).items():
            terms[letters] = terms.get(letters, Fraction(0)) + factor
        return SymbolicSize.of(int(self) + int(other), terms)

    def __mul__(self, other: int) -> SymbolicSize:
        terms: dict[tuple[Letter, ...], Fraction] = {}
        for mine, a in self.terms.items():
            for theirs, b in _terms(other).items():
                letters = tuple(sorted(mine + theirs))
                terms[letters] = terms.get(letters, Fraction(0)) + a * b
        return SymbolicSize.of(int(self) * int(other), terms)

    def __floordiv__(self, other: int) -> int:
        if isinstance(other, SymbolicSize) or int(self) % other:
            return int(self) // int(other)
        return SymbolicSize.of(int(self) // other, {letters: factor / other for letters, factor in self.terms.items()})

    __radd__, __rmul__ = __add__, __mul__

    def at(self, values: dict[str, int]) -> Fraction:
        """Its value where letters have other ones."""
        return sum(
            (factor * math.prod(values[letter] for _, letter in letters) for letters, factor in self.terms.items()),
            Fraction(0),
        )

    def __repr__(self) -> str:
        return int.__repr__(self)

    def __str__(self) -> str:
        return " + ".join(_product(letters, factor) for letters, factor in sorted(self.terms.items()))


def _product(letters: tuple[Letter, ...], factor: Fraction) -> str:
    counted = [(letter, len(list(run))) for (_, letter), run in itertools.groupby(letters)]
    powers = [letter if power == 1 else f"{letter}^{power}" for letter, power in counted]
    return " ".join([*([] if factor == 1 and letters else [str(factor)]), *powers])


def _terms(value: int) -> dict[tuple[Letter, ...], Fraction]:
    return value.terms if isinstance(value, SymbolicSize) else {(): Fraction(int(value))} if value else {}


def letter_of(config_cls: Any, field: str) -> str:
    """The letter of a size, "" where its meaning begins with none.

    >>> letter_of(AttentionConfig, "num_heads")
    'H'
    """
    found = LETTER.match(meanings(config_cls).get(field, ""))
    return found[1] if found else ""


def _letters(config: AttentionConfig, tiny: AttentionConfig) -> dict[str, str]:
    """Field -> letter, for the sizes of a config; equal letters where the tiny config says that they go together."""
    fields, names = tiny.to_dict(), {}
    for field, value in config.to_dict().items():
        if type(value) is int and value != 1:
            same = [other for one, other in SAME if field == one and fields[one] == fields[other]]
            known = [other for other in same if value == getattr(config, other)] or [field]
            names[field] = letter_of(type(config), known[0]) or field
    return names


def cache_formula(info: MechanismInfo, config: AttentionConfig) -> tuple[str, str]:
    """What a token leaves in the cache of a layer, and what a sequence does however long, in closed form.

    "" where it is nothing, or where a size reached a slot by a way that letters do not survive: the form found at the
    tiny config must give the numbers of `config` too.
    """
    tiny = info.config_cls.tiny()
    letters = _letters(tiny, tiny)
    values = {letter: getattr(config, field) for field, letter in letters.items()}
    forms, numbers = _remembered(tiny, letters), _remembered(config, {})
    return tuple(
        str(form) if isinstance(form, SymbolicSize) and form.at(values) == number else ""
        for form, number in zip(forms, numbers, strict=True)
    )  # type: ignore[return-value]


def _remembered(config: AttentionConfig, letters: dict[str, str]) -> tuple[int, int]:
    """Elements a token leaves, and a sequence, in sizes that know their letters."""
    with torch.device("meta"):
        attn = build_from_config(config)
    symbolic: Any = copy.copy(config)
    places: dict[str, int] = {}
    for field in (field for field in own_first(type(config)) if field in letters):
        place = places.setdefault(letters[field], len(places))
        object.__setattr__(symbolic, field, SymbolicSize.named(getattr(config, field), letters[field], place))
    attn.config = symbolic
    growing = sum((heads * width for heads, width in attn.cache_slots().values()), 0)
    return growing, sum((heads * rows * width for heads, rows, width in attn.constant_slots().values()), 0)
