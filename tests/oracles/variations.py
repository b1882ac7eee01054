"""Lists of small configs to run a whole suite on: every registered mechanism, and every option it admits."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import pytest

from headloom.contract.config import AttentionConfig

COMMON: list[dict[str, Any]] = [
    {"causal": False},
    {"window": 2},
    {"window": 1},
    {"window": 3},
    {"rope_theta": None},
    {"rotary_dim": 2},
    {"qk_norm": "head"},
    {"qk_norm": "width"},
    {"softcap": 0.8},
    {"qkv_bias": True},
    {"out_bias": True},
    {"scale": 0.4},
    {"value_dim": 3},
    {"projection": "bit"},
]
FIELDS = {field.name for field in dataclasses.fields(AttentionConfig)}


def changes(cls: Any) -> list[dict[str, Any]]:
    """Single changes of `tiny()`: the common options, each choice of each Literal, numbers of key/value heads, what
    `variations()` change, and the other bases. Which go together, the config says when it is built."""
    tiny = cls.tiny()
    before = tiny.to_dict()
    found = [*COMMON, *({"num_kv_heads": g} for g in range(1, tiny.num_heads) if tiny.num_heads % g == 0)]
    found += [{k: v for k, v in c.to_dict().items() if v != before.get(k)} for c in varied(cls)]
    found += [{"base": base} for base in cls.bases if base != tiny.base]
    found = [change for change in found if accepted(cls, change)]
    return found + [change for change in own_choices(cls) if change not in found]


def own_choices(cls: Any) -> list[dict[str, Any]]:
    """Each choice of each Literal or truth value among a config's options, and None, but those of `tiny()`."""
    hints, tiny, found = typing.get_type_hints(cls), cls.tiny(), []
    for field in dataclasses.fields(cls):
        choices = literals(hints[field.name])
        if hints[field.name] is bool and field.name not in FIELDS:
            choices = [True, False]
        if type(None) in typing.get_args(hints[field.name]) and field.name not in FIELDS:
            choices.append(None)
        # "packed" projections are made by hl.pack_bits from trained ones, with tests of their own
        found += [{field.name: c} for c in choices if c != "packed" and c != getattr(tiny, field.name)]
    return found


def varied(cls: Any) -> list[Any]:
    """The further configs that a mechanism offers for tests."""
    offered = getattr(cls, "variations", None)
    return list(offered()) if offered is not None else []


def accepted(cls: Any, change: dict[str, Any]) -> bool:
    """Whether the mechanism can be built with this change."""
    try:
        return bool(cls.tiny(**change) != cls.tiny())
    except ValueError:
        return False


def configs(mechanisms: dict[str, Any], few: bool = False) -> list[Any]:
    """pytest params of (name, config): tiny(), its `variations()`, without causality, and, unless `few`, with a window
    and each choice that the mechanism adds to the common ones."""
    params = []
    for name, info in mechanisms.items():
        cls = info.config_cls
        found = {"tiny": cls.tiny()}
        alone = [{"causal": False}]
        if not few:
            alone += [{"window": 2}, *(c for c in own_choices(cls) if not set(c) & FIELDS)]
        built = [cls.tiny(**change) for change in alone if accepted(cls, change)]
        for config in (*varied(cls), *built):
            found.setdefault(label(cls.tiny(), config), config)
        params += [pytest.param((name, config), id=f"{name}-{text}") for text, config in found.items()]
    return params


def only(admits: Callable[[str, Any], bool]) -> Callable[[Any], Any]:
    """Mark a conformance test to run only on the (name, config) for which it says something."""

    def mark(test: Any) -> Any:
        test.admits = admits
        return test

    return mark


def literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in literals(part)]


def label(tiny: Any, config: Any) -> str:
    base, changed = tiny.to_dict(), config.to_dict()
    return "-".join(f"{k}={v}" for k, v in changed.items() if base.get(k) != v) or "same"
