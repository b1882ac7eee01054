"""Hypothesis strategies: a mechanism with several of its options at once, and calls of it."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import headloom as hl
from oracles.variations import changes

MECHANISMS = sorted(hl.mechanisms())
CONFIGS = {name: info.config_cls for name, info in hl.mechanisms().items()}
CHANGES = {name: changes(cls) for name, cls in CONFIGS.items()}
#: what a mask cannot say to them: see tests/contract/conformance/test_exactly.py, which holds these lists
LOOKS_BACK = {"deltaformer"}  # a mask in which a token sees a later one is refused
STATE = {"linear"}  # a state of constant size stands for the cached tokens: no mask reaches into it


def examples(times: float) -> settings:
    """So many times as many examples as the profile has."""
    return settings(max_examples=max(1, int(times * settings.default.max_examples)))


@st.composite
def configs(draw: Any, name: str, admits: Callable[[Any], bool] = lambda config: True) -> Any:
    """`tiny()` with up to five changes at once; those that do not go with the ones before are left out."""
    found: dict[str, Any] = {}
    config = CONFIGS[name].tiny()
    for change in draw(st.lists(st.sampled_from(CHANGES[name]), max_size=5)):
        if set(change) & set(found):
            continue
        try:
            new = CONFIGS[name].tiny(**found, **change)
        except ValueError:
            continue
        # the largest of scores that a cap has made nearly equal is a matter of rounding
        if admits(new) and not (new.score == "hard" and new.softcap is not None):
            found, config = {**found, **change}, new
    return config


@dataclasses.dataclass(frozen=True)
class Call:
    """What is told of the tokens of a call, and how many there are; `sides` are the arguments."""

    batch: int
    tokens: int
    padding: Tensor | None
    documents: Tensor | None
    positions: Tensor | None

    @property
    def sides(self) -> dict[str, Tensor]:
        given = {"padding": self.padding, "documents": self.documents, "positions": self.positions}
        return {name: value for name, value in given.items() if value is not None}

    def row(self, b: int) -> dict[str, Any]:
        """The arguments of one row, as the oracles take them."""
        return {name: None if (value := getattr(self, name)) is None else value[b] for name in FIELDS}


FIELDS = ("positions", "padding", "documents")


def rows(batch: int, tokens: int, values: Any) -> Any:
    """(batch, tokens) tensors of `values`."""
    row = st.lists(values, min_size=tokens, max_size=tokens)
    return st.lists(row, min_size=batch, max_size=batch).map(torch.tensor)


def paddings(batch: int, tokens: int) -> Any:
    """True = real; padding stands anywhere, on the left more often than elsewhere."""
    steps = torch.arange(tokens)
    left = st.lists(st.integers(0, tokens), min_size=batch, max_size=batch)
    return left.map(lambda ends: steps >= torch.tensor(ends)[:, None]) | rows(batch, tokens, st.booleans())


def documents(batch: int, tokens: int) -> Any:
    """A few ids, in runs or not."""
    ids = rows(batch, tokens, st.integers(0, 2))
    return ids | ids.map(lambda found: found.cumsum(1))


def positions(batch: int, tokens: int) -> Any:
    """Steps of 1, from anywhere, that start again at a few places."""

    def places(drawn: tuple[Tensor, Tensor]) -> Tensor:
        opens, start = drawn
        index = torch.arange(tokens)
        last = torch.where(opens, index, 0).cummax(1).values
        return index - last + torch.where(last == 0, start, 0)

    return st.tuples(rows(batch, tokens, st.sampled_from([False, False, True])), rows(batch, 1, st.integers(0, 9))).map(
        places
    )


@st.composite
def calls(draw: Any) -> Call:
    """Padding, documents and positions, each given or not."""
    batch, T = draw(st.integers(1, 2)), draw(st.integers(1, 6))
    sides = [draw(st.none() | kind(batch, T)) for kind in (paddings, documents, positions)]
    return Call(batch, T, *sides)


@st.composite
def masks(draw: Any, batch: int, tokens: int, *, backwards: bool = False) -> Any:
    """A mask of every kind that is about pairs, or none; `backwards`: pairs that see no later token."""
    kind = draw(st.sampled_from(["none", "causal", "window", "pairs"]))
    if kind == "causal":
        return hl.Causal()
    if kind == "window":
        return hl.Window(draw(st.integers(1, tokens + 1)))
    if kind == "none":
        return None
    seen = torch.rand(batch, tokens, tokens, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) > 0.4
    seen |= torch.eye(tokens, dtype=torch.bool)
    return hl.Dense(seen.tril() if backwards else seen)


def allowed(mask: Any, tokens: int) -> Tensor:
    """(1 or B, T, T) booleans of a mask over one call."""
    index = torch.arange(tokens)
    if mask is None:
        return torch.ones(1, tokens, tokens, dtype=torch.bool)
    return mask.values if isinstance(mask, hl.Dense) else mask.visible(index[:, None], index)[None]
