"""What is compared, as text: `iha:pseudo_heads=2:order=token` is a name, then options after colons.

The name is a mechanism's, or a schedule's, which says what stands in which layer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

from headloom.core.errors import HeadloomError, near

# What every layer of every variant takes from the model's size: a variant that sets one is not a variant of attention.
OF_THE_SIZE = ("hidden_size", "num_heads", "head_dim")


@dataclass(frozen=True)
class Variant:
    """One mechanism or schedule with its options, as given (defaults are not spelled out).

    `label` names it in tables and folders: its name, with its options where the name alone is not unique.
    `defaulted` are the options that came from defaults.toml.
    """

    mechanism: str
    options: Mapping[str, Any] = field(default_factory=dict)
    label: str = ""
    defaulted: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The text that parses to this variant."""
        return ":".join([self.mechanism, *(f"{name}={_show(value)}" for name, value in sorted(self.options.items()))])


@dataclass(frozen=True)
class Defaults:
    """The contents of defaults.toml."""

    variants: tuple[str, ...]
    reference: str
    options: Mapping[str, Mapping[str, Any]]


@cache
def defaults() -> Defaults:
    """What `compare` does when it is not told."""
    read = tomllib.loads(files("headloom.lab").joinpath("defaults.toml").read_text(encoding="utf-8"))
    return Defaults(tuple(read["variants"]), read["reference"], read["options"])


def parse_options(mechanism: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Typed options of a mechanism or schedule from (name, text) pairs; unknown ones give the near names."""
    from headloom.attention.schedules import option_classes
    from headloom.core.config import fields_of, parse_option

    classes = option_classes(mechanism)
    options: dict[str, Any] = {}
    for name, text in pairs:
        having = [cls for cls in classes if name in fields_of(cls)]
        if not having:
            allowed = dict.fromkeys(field for cls in classes for field in fields_of(cls))
            raise HeadloomError(
                f"unknown option '{name}' of {mechanism}.{near(name, allowed)} Allowed: {', '.join(allowed)}"
            )
        if name in options:
            raise HeadloomError(f"option '{name}' of {mechanism} is given twice; give it once")
        try:
            options[name] = parse_option(having[0], name, text)
        except HeadloomError as error:
            raise HeadloomError(f"{mechanism}: {error}") from None
    return options


def split_pair(text: str, what: str) -> tuple[str, str]:
    """("pseudo_heads", "2") from "pseudo_heads=2"."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip() or not value.strip():
        raise HeadloomError(f"{what} must look like name=value, not '{text}'")
    return name.strip(), value.strip()


def parse_variant(text: str) -> Variant:
    """One variant from "iha:pseudo_heads=2:order=token"."""
    mechanism, *pairs = (part.strip() for part in text.split(":"))
    if not mechanism:
        raise HeadloomError(f"a variant must look like name:option=value:..., not '{text}'")
    found = (split_pair(pair, f"an option of {mechanism}") for pair in pairs)
    return Variant(mechanism, parse_options(mechanism, found))


def parse_settings(settings: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`["iha.pseudo_heads=2"]` -> {"iha": {"pseudo_heads": 2}}: options for every variant of that name."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    for setting in settings:
        path, value = split_pair(setting, "--set")
        mechanism, dot, name = path.partition(".")
        if not dot or not mechanism or not name:
            raise HeadloomError(f"--set must look like name.option=value (iha.pseudo_heads=2, say), not '{setting}'")
        pairs.setdefault(mechanism, []).append((name, value))
    return {mechanism: parse_options(mechanism, given) for mechanism, given in pairs.items()}


def parse_variants(
    variants: str | Sequence[str] | None, settings: Sequence[str] = (), *, at_least: int = 2
) -> list[Variant]:
    """The variants of a comparison, labelled.

    Args:
        variants: "mha,iha:pseudo_heads=2", or a list of such texts, or None for the default four.
        settings: `--set` texts; they apply to every variant of their name and win over its own options.
        at_least: how many there must be.

    An option that neither gives is taken from defaults.toml, then from the mechanism. Raises HeadloomError for unknown
    names (with the near ones), for duplicates, for fewer than `at_least`, and for options that belong to the size.
    """
    given = defaults().variants if variants is None else variants
    texts = [text.strip() for text in (given.split(",") if isinstance(given, str) else given)]
    parsed = [parse_variant(text) for text in texts if text]
    chosen = parse_settings(settings)
    for mechanism in chosen:
        names = [variant.mechanism for variant in parsed]
        if mechanism not in names:
            raise HeadloomError(
                f"--set {mechanism}.{next(iter(chosen[mechanism]))} sets nothing: the variants are {', '.join(names)}."
                f"{near(mechanism, names)}"
            )
    complete = [with_defaults(variant, chosen.get(variant.mechanism, {})) for variant in parsed]
    if len(complete) < at_least:
        least = "two variants" if at_least == 2 else "one variant"
        raise HeadloomError(f"a comparison needs at least {least}, not {len(complete)} ('{','.join(texts)}')")
    labels = labelled(complete)
    return [replace(variant, label=label) for variant, label in zip(complete, labels, strict=True)]


def refuse_duplicates(resolved: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse two variants that are one and the same: label -> (mechanism, whole config)."""
    labels = list(resolved)
    for place, label in enumerate(labels):
        for other in labels[:place]:
            if resolved[label] == resolved[other]:
                raise HeadloomError(
                    f"the variants '{other}' and '{label}' are the same: every option is equal; leave one out"
                )


def with_defaults(variant: Variant, chosen: Mapping[str, Any]) -> Variant:
    """The variant with `chosen` over its own options, and defaults.toml under both."""
    given = {**variant.options, **chosen}
    for name in OF_THE_SIZE:
        if name in given:
            raise HeadloomError(
                f"{variant.mechanism} sets {name}, which all variants share: choose it for all with --size"
            )
    added = {name: value for name, value in defaults().options.get(variant.mechanism, {}).items() if name not in given}
    return Variant(variant.mechanism, {**added, **given}, defaulted=tuple(added))


def labelled(variants: Sequence[Variant], *, unique: bool = True) -> list[str]:
    """What each goes by: its name, with its options where that is not unique. `unique`: refuse what is still double."""
    names = [variant.mechanism for variant in variants]
    labels: list[str] = []
    for variant in variants:
        label = variant.mechanism if names.count(variant.mechanism) == 1 else variant.text
        if unique and label in labels:
            raise HeadloomError(f"the variant '{label}' is given twice: leave one out, or give them different options")
        labels.append(label)
    return labels


def _show(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
