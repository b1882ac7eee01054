"""Runs of one study may differ in the mechanism, its options, the feed-forward width and the seed: in nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from headloom.core.errors import HeadloomError

ABSENT = "(absent)"


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"attention": {"order": "token"}} -> {"attention.order": "token"}; empty mappings stay."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def differences(
    configs: Mapping[str, Mapping[str, Any]], without: Mapping[str, Collection[str]] | None = None
) -> dict[str, dict[str, Any]]:
    """Every key whose values differ over the labelled configs: key -> {label: value}.

    `without`: label -> keys that this variant's mechanism ignores; its value there is not compared.
    """
    without = without or {}
    flat = {label: flatten(config) for label, config in configs.items()}
    keys = list(dict.fromkeys(key for config in flat.values() for key in config))
    found = {}
    for key in keys:
        values = {label: config.get(key, ABSENT) for label, config in flat.items() if key not in without.get(label, ())}
        first = next(iter(values.values()), None)
        if any(type(value) is not type(first) or value != first for value in values.values()):
            found[key] = values
    return found


def refuse_other_differences(
    configs: Mapping[str, Mapping[str, Any]],
    allowed: Iterable[str],
    without: Mapping[str, Collection[str]] | None = None,
) -> None:
    """Raise HeadloomError, printing the difference, if the configs differ in a key that is not allowed.

    `allowed` are whole keys ("seed") or prefixes ending in a point ("mechanism_options."); `without` as `differences`.
    """
    allowed = tuple(allowed)
    other = {
        key: values
        for key, values in differences(configs, without).items()
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in allowed)
    }
    if other:
        printed = "; ".join(
            f"{key}: " + ", ".join(f"{label} {value!r}" for label, value in values.items())
            for key, values in other.items()
        )
        raise HeadloomError(
            f"the runs differ in more than the mechanism, so the comparison would not be fair: {printed}; "
            f"give every variant the same value"
        )
