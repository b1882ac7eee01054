"""What a benchmark was asked for, and what can be said of that before torch is imported."""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError, unknown

DTYPES = ("float32", "bfloat16", "float16", "float64")
MODES = ("forward", "backward")
"""Of layers. forward: without a graph, as in inference. backward: forward and backward, gradients of weights and
input."""
MODEL_MODES = ("backward", "step", "train")
"""Of models. step: both passes and AdamW; train: a step in the loop of `headloom train`."""
PARTS = ("layer", "scores")


@dataclasses.dataclass(frozen=True)
class Named:
    """A mechanism or schedule with options, under the label that tables use. notes: what is to be said of them."""

    label: str
    mechanism: str
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes that all layers share; None: the mechanism's own default."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope_theta: float | None = 10000.0

    def given(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if value is not None or name == "rope_theta"}


@dataclasses.dataclass(frozen=True)
class ModelSize:
    """One model size: its name, its usual context, and the arguments of `hl.build_model` that all variants share."""

    name: str
    tokens: int
    arguments: Mapping[str, Any]


def check_counts(counts: Mapping[str, Sequence[int]]) -> None:
    """Refuse lengths and sizes below 1, by the name of their option."""
    for what, numbers in counts.items():
        for number in numbers:
            if number < 1:
                raise HeadloomError(f"{what} must be at least 1, not {number}")


def check_layers(part: str, *, against: str | None, plainly: bool, compiled: bool) -> None:
    """Refuse what goes with no measurement of layers."""
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    if part == "scores" and (against is not None or plainly or compiled):
        raise HeadloomError(
            "the scores alone have no other form to be timed beside: against, plain forms and compile "
            "go with part layer"
        )
    if against is not None:
        read_against(against)


def check_models(modes: Sequence[str], *, compiled: bool, dtype: str | None) -> None:
    """Refuse what goes with no measurement of whole models."""
    for mode in modes:
        if mode not in MODEL_MODES:
            raise unknown("mode", mode, MODEL_MODES)
    if compiled and "train" in modes:
        raise HeadloomError("the mode train runs both loops as they are: compile goes with backward and step")
    if dtype not in ("float32", "bfloat16"):
        raise HeadloomError(f"training steps run in float32 or bfloat16, not {dtype}")


def read_against(text: str) -> tuple[str, str, dict[str, Any]]:
    """("mine.attention", "MyAttention", {"dim": 512}) from "mine.attention:MyAttention:dim=512". Raises HeadloomError
    for a text of another form, and for a file that does not exist."""
    place, colon, rest = text.partition(":")
    name, *pairs = rest.split(":")
    if not colon or not place or not name:
        raise HeadloomError(f"--against must look like package.module:Class (options after colons), not '{text}'")
    if place.endswith(".py") and not Path(place).is_file():
        raise HeadloomError(
            f"'{place}' cannot be imported: there is no such file. Give a module on the path, or a file ending in .py"
        )
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise HeadloomError(f"an option of {place}:{name} must look like name=value, not '{pair}'")
        try:
            options[key.strip()] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            options[key.strip()] = {"true": True, "false": False, "none": None}.get(value.lower(), value)
    return place, name, options
