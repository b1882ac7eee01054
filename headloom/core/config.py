"""Frozen configs: their values are checked against the annotations when they are built; to JSON and back, strictly."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from typing import Any, Self

from headloom.core.errors import HeadloomError, near


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Base of frozen, keyword-only dataclasses whose values are int, float, bool, str, None, Literal, dict or list.

    Raises HeadloomError when a value does not have the type of its field.
    """

    def __post_init__(self) -> None:
        cls: Any = type(self)
        for name in fields_of(cls):
            object.__setattr__(self, name, check_value(cls, name, getattr(self, name)))

    def to_dict(self) -> dict[str, Any]:
        """The config as a dict of JSON values, from which `from_dict` builds an equal config."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Build a config from JSON values. Raises HeadloomError for an unknown key and suggests a similar name."""
        check_names(cls, values)
        return cls(**values)

    def replace(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        check_names(type(self), changes)
        return dataclasses.replace(self, **changes)


@functools.cache
def fields_of(cls: Any) -> dict[str, Any]:
    """Field name -> resolved annotation."""
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def own_first(cls: Any) -> list[str]:
    """The names of a config class's fields: its own first, then those of its base classes."""
    found: dict[str, None] = {}
    for part in cls.__mro__:
        found |= {name: None for name in inspect.get_annotations(part) if name in fields_of(cls)}
    return list(found)


@functools.cache
def meanings(cls: Any) -> dict[str, str]:
    """Field name -> its explanation: the text in its annotation, `Annotated[int, "what it means"]`."""
    found: dict[str, str] = {}
    for part in reversed(cls.__mro__):
        own = inspect.get_annotations(part)
        if dataclasses.is_dataclass(part):
            hints = typing.get_type_hints(part, include_extras=True)
            texts = {name: getattr(hints[name], "__metadata__", ()) for name in own if name in hints}
            found |= {name: given[0] for name, given in texts.items() if given and isinstance(given[0], str)}
    return found


def unknown_option(name: str, classes: typing.Sequence[Any], *, of: str = "") -> HeadloomError:
    """The error for an option that none of the config classes has. It lists the allowed options, their own ones first.

    of: whose options they are, for the message.
    """
    allowed = list(dict.fromkeys(field for cls in classes for field in own_first(cls)))
    return HeadloomError(
        f"unknown option '{name}'{f' of {of}' if of else ''}.{near(name, allowed)} Allowed: {', '.join(allowed)}"
    )


def check_names(cls: type, values: typing.Iterable[str], *, of: str = "") -> None:
    """Raise HeadloomError for the first name that is not a field of the config class `cls`."""
    for name in values:
        if name not in fields_of(cls):
            raise unknown_option(name, [cls], of=of)


def check_value(cls: type, name: str, value: Any) -> Any:
    """`value`, if the field `name` can hold it; an int becomes a float where the field is a float.

    Raises HeadloomError for a value of another type.
    """
    allowed = fields_of(cls)[name]
    if not _fits(value, allowed):
        raise HeadloomError(f"{name} must be {describe(allowed)}, not {value!r}")
    return float(value) if type(value) is int and float in members(allowed) and int not in members(allowed) else value


def parse_option(cls: type, name: str, text: str) -> Any:
    """Convert `text` (from a command line) to the type of the field `name` of the config class `cls`.

    Raises HeadloomError for an unknown field and for a text that cannot be converted.

    >>> from headloom.mechanism.iha import IHAConfig
    >>> parse_option(IHAConfig, "pseudo_heads", "2"), parse_option(IHAConfig, "window", "none")
    (2, None)
    """
    check_names(cls, [name])
    allowed = fields_of(cls)[name]
    kinds = members(allowed)
    lowered = text.strip().lower()
    if types.NoneType in kinds and lowered in ("none", "null"):
        return None
    if bool in kinds and lowered in ("true", "false"):
        return lowered == "true"
    for number in (int, float):
        if number in kinds:
            try:
                return number(text)
            except ValueError:
                pass
    if text in kinds or str in kinds:
        return text
    raise HeadloomError(f"{name} must be {describe(allowed)}, not '{text}'.{near(text, map(str, kinds))}")


def describe(annotation: Any) -> str:
    """An annotation in words: "an int or None", "'virtual' or 'token'"."""
    words = {int: "an int", float: "a number", bool: "true or false", str: "a text", types.NoneType: "None"}
    words |= {dict: "a mapping", list: "a list"}
    return " or ".join(words.get(typing.get_origin(m) or m, repr(m)) for m in members(annotation))


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of an annotation: the types of a union, the values of a Literal, or the annotation itself."""
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return tuple(m for part in typing.get_args(annotation) for m in members(part))
    if origin is typing.Literal:
        return typing.get_args(annotation)
    return (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    for member in members(annotation):
        if not isinstance(member, type) and typing.get_origin(member) is None:
            if type(value) is type(member) and value == member:  # a Literal's value; True is not 1
                return True
        elif typing.get_origin(member) in (dict, list):
            if isinstance(value, typing.get_origin(member)):
                return True
        elif member is float:
            if type(value) in (int, float):
                return True
        elif type(value) is member:
            return True
    return False
