"""Groups of options: panels in a long --help, and dataclasses of options that several commands share."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ParamSpec, TypeVar, get_args, get_type_hints

P = ParamSpec("P")
R = TypeVar("R")

WHAT, MODEL, TEXT, TRAINING, MACHINE = (
    "What is compared",
    "The model",
    "The text",
    "Training",
    "The machine and the result",
)
"""Titles of the panels. Options with the same meaning are in the panel of the same title in every command."""


def in_panels(panels: Mapping[str, str]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that shows a command's options in panels: title -> parameter names, separated by spaces. Names that
    the command does not have are ignored. Types, defaults and help texts stay with the parameters."""
    titles = {name: title for title, names in panels.items() for name in names.split()}

    def grouped(command: Callable[P, R]) -> Callable[P, R]:
        hints = get_type_hints(command, include_extras=True)
        for name in titles.keys() & hints.keys():
            option = copy.copy(hints[name].__metadata__[0])
            option.rich_help_panel = titles[name]
            hints[name] = Annotated[get_args(hints[name])[0], option]
        signature = inspect.signature(command)
        parameters = [each.replace(annotation=hints[each.name]) for each in signature.parameters.values()]
        command.__annotations__ = hints
        command.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return command

    return grouped


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """A decorator that replaces a parameter whose type is a dataclass of options by these options."""
    hints: dict[str, Any] = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if dataclasses.is_dataclass(hint)}
    options: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        inside = groups.get(name)
        parameters = [parameter] if inside is None else list(inspect.signature(inside).parameters.values())
        types = hints if inside is None else get_type_hints(inside, include_extras=True)
        options += [option.replace(annotation=types[option.name]) for option in parameters]

    @functools.wraps(command)
    def wrapped(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
        command(**given)

    wrapped.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    wrapped.__annotations__ = {option.name: option.annotation for option in options}
    return wrapped
