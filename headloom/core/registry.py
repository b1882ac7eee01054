"""A mapping from names to what is registered: it refuses duplicates and suggests similar names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

from headloom.core.errors import unknown

T = TypeVar("T")


class Registry(Mapping[str, T]):
    """A mapping to which names can only be added. `kind` ("mechanism") is the word that its errors use."""

    def __init__(self, kind: str):
        self.kind = kind
        self._items: dict[str, T] = {}

    def add(self, name: str, item: T) -> T:
        """Register `item`. A name that is already used for something else is a programming error: TypeError."""
        if name in self._items and self._items[name] is not item:
            raise TypeError(f"{self.kind} '{name}' is registered twice: {self._items[name]!r} and {item!r}")
        self._items[name] = item
        return item

    def __getitem__(self, name: str) -> T:
        if name not in self._items:
            raise unknown(self.kind, name, self._items)
        return self._items[name]

    def __contains__(self, name: object) -> bool:
        return name in self._items

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
