"""One list of small configs to run a whole suite on: every registered mechanism, every option it admits, once each."""

import dataclasses
import typing
from collections.abc import Callable
from typing import Any

import pytest

from headloom.contract.bases.base import BASES, options_of
from headloom.contract.config import AttentionConfig

COMMON: list[dict[str, Any]] = [
    {"causal": False},
    {"window": 2},
    {"causal": False, "window": 2},
    {"window": 1},
    {"window": 3},
    {"rope_theta": None},
    {"rotary_dim": 2},
    {"qk_norm": "head"},
    {"qk_norm": "width"},
    {"softcap": 0.8},
    {"qkv_bias": True, "out_bias": True},
    {"scale": 0.4},
    {"value_dim": 3},
    {"projection": "bit"},
]
PLAIN = 3  # of them for mechanisms that only choose the number of key/value heads


def configs(mechanisms: dict[str, Any], lean: bool = False) -> list[Any]:
    """pytest params of (name, config): tiny(), its `variations()`, each common option, each choice of each Literal,
    and the mechanism over each other base that it admits.

    `lean` leaves out the common options beyond causality and windows, for the slow tests.
    """
    params = []
    common = len(dataclasses.fields(AttentionConfig))
    shared = set(options_of(base for base in BASES if not issubclass(BASES[base].options, AttentionConfig)))
    for name, info in mechanisms.items():
        cls, tiny = info.config_cls, info.config_cls.tiny
        found = {"tiny": tiny()}
        offered = getattr(cls, "variations", None)
        for config in offered() if offered is not None else ():
            found.setdefault(label(tiny(), config), config)
        hints = typing.get_type_hints(cls)
        # adds no option: its own test has them all against the oracle
        plain = len({field.name for field in dataclasses.fields(cls)} - shared) == common
        changes = COMMON[:PLAIN] if plain or lean else list(COMMON)
        for field in dataclasses.fields(cls)[common if lean else 0 :] if not plain else ():
            # "packed" projections are made by hl.pack_bits from trained ones, with tests of their own
            choices = [choice for choice in literals(hints[field.name]) if choice != "packed"]
            changes += [{field.name: choice} for choice in choices]
        heads = tiny().num_heads
        changes += [{"num_kv_heads": g} for g in range(1, heads) if heads % g == 0 and not lean]
        changes += [change for base in cls.bases if base != tiny().base for change in over(base, cls, hints, lean)]
        for change in changes:
            try:
                config = tiny(**change)
            except ValueError:
                continue
            if config != tiny():
                found.setdefault(label(tiny(), config), config)
        params += [pytest.param((name, config), id=f"{name}-{text}") for text, config in found.items()]
    return params


def over(base: str, cls: Any, hints: dict[str, Any], lean: bool) -> list[dict[str, Any]]:
    """Changes for a mechanism over another base; one that grouped keys are a case of (mha, mqa) needs no options."""
    if base in ("gqa", "mha", "mqa"):
        return [] if lean else [{"base": base}]
    options = [] if lean else [*COMMON[:PLAIN], *({"cache": choice} for choice in literals(hints.get("cache")))]
    return [{"base": base, **option} for option in [{}, *options]]


def only(admits: Callable[[str, Any], bool]) -> Callable[[Any], Any]:
    """Mark a conformance test to run only on the (name, config) for which it says something."""

    def mark(test: Any) -> Any:
        test.admits = admits
        return test

    return mark


def accepts(config: Any, **changes: Any) -> bool:
    """Whether the mechanism can be built with these changes."""
    try:
        return bool(config.replace(**changes))
    except ValueError:
        return False


def literals(annotation: Any) -> list[Any]:
    if typing.get_origin(annotation) is typing.Literal:
        return list(typing.get_args(annotation))
    return [choice for part in typing.get_args(annotation) for choice in literals(part)]


def label(tiny: Any, config: Any) -> str:
    base, changed = tiny.to_dict(), config.to_dict()
    return "-".join(f"{k}={v}" for k, v in changed.items() if base.get(k) != v) or "same"
