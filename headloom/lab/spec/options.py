"""Options of mechanisms as people write them: the one place where a text or a YAML value becomes an option's value.

A text is `pseudo_heads=2` or, for a mapping or a list, YAML: `rope_scaling={rope_type: linear, factor: 2}`.
Values that have a type already, from a study's file or from Python, are checked and stay what they are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.lab.spec.names import check_mechanism_name

_EXPONENT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-3, without a point or a sign, as text


def parse_options(mechanism: str, pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Typed options of a mechanism or schedule from (name, text or value) pairs; unknown ones give the near names."""
    pairs = list(pairs)
    check_mechanism_name(mechanism)
    if not pairs:
        return {}
    from headloom.core.config import fields_of, unknown_option
    from headloom.mechanism.schedules import option_classes  # seconds of imports, once the rest is known to be right

    classes = option_classes(mechanism)
    options: dict[str, Any] = {}
    for name, given in pairs:
        having = [cls for cls in classes if name in fields_of(cls)]
        if not having:
            raise unknown_option(name, classes, of=mechanism)
        if name in options:
            raise HeadloomError(f"option '{name}' of {mechanism} is given twice; give it once")
        try:
            options[name] = _value(having[0], name, given)
        except HeadloomError as error:
            raise HeadloomError(f"{mechanism}: {error}") from None
    return options


def _value(cls: Any, name: str, given: Any) -> Any:
    from headloom.core.config import check_value, parse_option

    if isinstance(given, str) and given.lstrip()[:1] in ("{", "["):
        import yaml

        try:
            given = yaml.safe_load(given)
        except yaml.YAMLError:
            raise HeadloomError(f"{name}: '{given}' is not YAML: write it as {{key: value, ...}}") from None
    if isinstance(given, str):
        return parse_option(cls, name, given)
    return check_value(cls, name, _numbers(given))


def _numbers(value: Any) -> Any:
    """Plain dicts and lists, with the numbers in them that YAML 1.1 leaves as texts."""
    if isinstance(value, Mapping):
        return {key: _numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(inner) for inner in value]
    return float(value) if isinstance(value, str) and _EXPONENT.fullmatch(value) else value


def option_text(value: Any) -> str:
    """The text that is read back as this value."""
    if isinstance(value, Mapping | list | tuple):
        import yaml

        text: str = yaml.safe_dump(_numbers(value), default_flow_style=True, sort_keys=False, width=float("inf"))
        return text.strip()
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def split_pair(text: str, what: str) -> tuple[str, str]:
    """("pseudo_heads", "2") from "pseudo_heads=2"."""
    if not isinstance(text, str):
        raise HeadloomError(f"{what} must be a text that looks like name=value, not {text!r}")
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise HeadloomError(f"{what} must look like name=value, not '{text}'")
    return name.strip(), value.strip()


def pieces(text: str, separator: str) -> list[str]:
    """`text`, cut where `separator` stands outside brackets.

    >>> pieces("mha,iha:rope_scaling={rope_type: linear, factor: 2}", ",")
    ['mha', 'iha:rope_scaling={rope_type: linear, factor: 2}']
    """
    found, depth, quote = [""], 0, ""
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif depth and letter in "'\"":
            quote = letter
        elif letter in "{[":
            depth += 1
        elif letter in "}]":
            depth -= 1
        elif letter == separator and depth <= 0:
            found.append("")
            continue
        found[-1] += letter
    if depth or quote:
        raise HeadloomError(f"brackets or quotes do not close in '{text}'")
    return found
