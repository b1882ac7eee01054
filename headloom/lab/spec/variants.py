"""What is compared, as text: `iha:pseudo_heads=2:order=token` is a name, then options after colons.

The name is a mechanism's, or a schedule's, which says what stands in which layer.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from headloom.core.errors import HeadloomError, near
from headloom.lab.spec.names import check_mechanism_name
from headloom.lab.spec.options import parse_options, pieces, split_pair
from headloom.lab.spec.resolved import Variant, refuse_sizes


@dataclass(frozen=True)
class Defaults:
    """The contents of defaults.toml."""

    variants: tuple[str, ...]
    reference: str
    options: Mapping[str, Mapping[str, Any]]


@cache
def defaults() -> Defaults:
    """What `compare` does when it is not told."""
    read = tomllib.loads(files("headloom.lab.spec").joinpath("defaults.toml").read_text(encoding="utf-8"))
    return Defaults(tuple(read["variants"]), read["reference"], read["options"])


Given = str | tuple[str, Mapping[str, Any]]
"""A variant as it is given: "iha:pseudo_heads=2", or ("iha", {"pseudo_heads": 2})."""


def _pair(given: Any) -> tuple[str, Mapping[str, Any]]:
    if isinstance(given, Sequence) and len(given) == 2 and isinstance(given[0], str) and isinstance(given[1], Mapping):
        return given[0], given[1]
    raise HeadloomError(f"a variant must be a text like iha:pseudo_heads=2, or (name, options), not {given!r}")


def split_variant(text: Given) -> tuple[str, list[tuple[str, Any]]]:
    """("iha", [("pseudo_heads", "2")]) from "iha:pseudo_heads=2", or of a mechanism and its options. The name is one
    that there is; options are not looked at."""
    if not isinstance(text, str):
        mechanism, options = _pair(text)
        found = list(options.items())
    else:
        mechanism, *pairs = (part.strip() for part in pieces(text, ":"))
        if not mechanism:
            raise HeadloomError(f"a variant must look like name:option=value:..., not '{text}'")
        found = [split_pair(pair, f"an option of {mechanism}") for pair in pairs]
    check_mechanism_name(mechanism)
    return mechanism, found


def parse_variant(text: Given) -> Variant:
    """One variant from "iha:pseudo_heads=2:order=token", or of a mechanism and its options."""
    mechanism, pairs = split_variant(text)
    return Variant(mechanism=mechanism, options=parse_options(mechanism, pairs))


def parse_settings(settings: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Options for every variant of a name: `["iha.pseudo_heads=2"]`, or {"iha": {"pseudo_heads": 2}}."""
    return {name: parse_options(name, pairs) for name, pairs in split_settings(settings).items()}


def split_settings(settings: Sequence[str] | Mapping[str, Mapping[str, Any]]) -> dict[str, list[tuple[str, Any]]]:
    """{"iha": [("pseudo_heads", "2")]} from settings; the names are ones that there are, options are not looked at."""
    pairs: dict[str, list[tuple[str, Any]]] = {}
    if isinstance(settings, Mapping):
        pairs = {name: list(_pair((name, given))[1].items()) for name, given in settings.items()}
        settings = ()
    if isinstance(settings, str):
        raise HeadloomError(f"settings must be a list of texts like iha.pseudo_heads=2, not the text '{settings}'")
    for setting in settings:
        path, value = split_pair(setting, "--set")
        mechanism, dot, name = path.partition(".")
        if not dot or not mechanism or not name:
            raise HeadloomError(f"--set must look like name.option=value (iha.pseudo_heads=2, say), not '{setting}'")
        pairs.setdefault(mechanism, []).append((name, value))
    for mechanism, given in pairs.items():
        check_mechanism_name(mechanism)
        names = [name for name, _ in given]
        for name in names:
            if names.count(name) > 1:
                raise HeadloomError(f"--set {mechanism}.{name} is given twice: give it once")
    return pairs


def parse_variants(
    variants: str | Sequence[Given] | None,
    settings: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    *,
    at_least: int = 2,
) -> list[Variant]:
    """The variants of a comparison, labelled.

    Args:
        variants: "mha,iha:pseudo_heads=2", or a list of such texts or of (name, options), or None for the default four.
        settings: `--set` texts, or {"iha": {"pseudo_heads": 2}}; they apply to every variant of their name and win over
            its own options.
        at_least: how many there must be.

    Options left unset fall back to defaults.toml, then to the mechanism's own defaults.

    Raises HeadloomError for unknown names (with the near ones), for duplicates, for fewer than `at_least`, and for
    options that belong to the size.
    """
    given = check_variants(variants, settings, at_least=at_least)
    parsed = [parse_variant(one) for one in given]
    chosen = parse_settings(settings)
    complete = [with_defaults(variant, chosen.get(variant.mechanism, {})) for variant in parsed]
    labels = labels_of(complete)
    refuse_repeated(labels)
    return [variant.model_copy(update={"label": label}) for variant, label in zip(complete, labels, strict=True)]


def check_variants(
    variants: str | Sequence[Given] | None,
    settings: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    *,
    at_least: int = 2,
) -> Sequence[Given]:
    """The variants one by one, refused as `parse_variants` does for all but their options: torch is not imported."""
    given: Any = defaults().variants if variants is None else variants
    if isinstance(given, str):
        given = [text for text in pieces(given, ",") if text.strip()]
    if not isinstance(given, Sequence):
        raise HeadloomError(f"variants must be a text or a list of texts, not {given!r}")
    if len(given) < at_least:
        least = "two variants" if at_least == 2 else "one variant"
        texts = ",".join(one if isinstance(one, str) else str(one[0]) for one in given)
        raise HeadloomError(f"a comparison needs at least {least}, not {len(given)} ('{texts}')")
    names = [split_variant(one)[0] for one in given]
    for mechanism, pairs in split_settings(settings).items():
        if mechanism not in names:
            setting = next((name for name, _ in pairs), "")
            raise HeadloomError(
                f"--set {mechanism}.{setting} sets nothing: the variants are {', '.join(names)}."
                f"{near(mechanism, names)}"
            )
    return given


def refuse_duplicates(resolved: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse two variants that are one and the same: label -> (mechanism, whole config)."""
    labels = list(resolved)
    for place, label in enumerate(labels):
        for other in labels[:place]:
            if resolved[label] == resolved[other]:
                raise HeadloomError(
                    f"the variants '{other}' and '{label}' are the same: every option is equal; leave one out"
                )


def with_defaults(variant: Variant, chosen: Mapping[str, Any], *, of_size: bool = False) -> Variant:
    """The variant with `chosen` over its own options, and defaults.toml under both. of_size: it may set its size."""
    given = {**variant.options, **chosen}
    if not of_size:
        refuse_sizes(variant.mechanism, given)
    added = {name: value for name, value in defaults().options.get(variant.mechanism, {}).items() if name not in given}
    return variant.model_copy(update={"options": {**added, **given}, "defaulted": tuple(added)})


def labels_of(variants: Sequence[Variant]) -> list[str]:
    """What each goes by: its mechanism's name, with its options where several have that name."""
    names = [variant.mechanism for variant in variants]
    return [each.mechanism if names.count(each.mechanism) == 1 else each.text for each in variants]


def refuse_repeated(labels: Sequence[str]) -> None:
    """Refuse two variants that go by one label."""
    for label in labels:
        if labels.count(label) > 1:
            raise HeadloomError(
                f"the variant '{label}' is given twice: leave one out, give them different options, or, in a study's "
                "file, a label each"
            )
