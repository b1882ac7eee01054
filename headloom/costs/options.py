"""The options of a mechanism or schedule: what each means, may be and is, and what another value of it costs.

Meanings and values are read from the config classes, where each stands once; costs are measured from the modules that
are built with another value, everything else as in a comparison.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from headloom.contract.bases import BASES
from headloom.contract.bases.base import options_of
from headloom.core.config import describe, fields_of, meanings, members, own_first
from headloom.core.errors import HeadloomError
from headloom.costs.catalogue import SIZES, TOKENS, table_line
from headloom.costs.count import Cost, layer_costs
from headloom.costs.formula import LETTER
from headloom.mechanism import AttentionConfig, mechanisms
from headloom.mechanism.schedules import layers_of, option_classes, schedules

LAYERS = 10
"""Of the model whose layers are measured where what stands in them differs."""


@dataclasses.dataclass(frozen=True)
class Option:
    """One option. own: of this mechanism alone. bases: those whose option it is. default: its own; usual: what a
    comparison takes instead, if it does.

    costs: another value, as text -> quantity ("parameters", "FLOPs", "cache", "scores") -> how many times as much.
    Values that do not go together with the other defaults are left out, and so are numbers that are no sizes.
    """

    name: str
    own: bool
    bases: tuple[str, ...]
    values: str
    default: Any
    usual: Any
    meaning: str
    costs: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)


def options(name: str, usual: Mapping[str, Any] | None = None, *, costs: bool = True) -> list[Option]:
    """All options of the mechanism or schedule `name`: its own, those of its bases, those of all mechanisms.

    Args:
        usual: the options that a comparison gives it where nobody does. costs: also measure (seconds).
    """
    usual = dict(usual or {})
    found: dict[str, Option] = {}
    for cls in option_classes(name):
        for option in _of_class(cls, usual):
            found.setdefault(option.name, option)
    place = {field: index for index, field in enumerate(fields_of(AttentionConfig))}
    rows = sorted(found.values(), key=lambda row: (not row.own, not row.bases, place.get(row.name, 0)))
    start = _measured(name, usual) if costs else None
    if start is None:
        return rows
    return [dataclasses.replace(row, costs=_costs(name, usual, row, start)) for row in rows]


def _of_class(cls: Any, usual: Mapping[str, Any]) -> list[Option]:
    common, bases = fields_of(AttentionConfig), getattr(cls, "bases", ())
    of_bases = options_of(base for base in bases if not issubclass(BASES[base].options, AttentionConfig))
    rows = []
    for field in own_first(cls):
        if field in getattr(cls, "without", ()):
            continue
        default = cls.__dataclass_fields__[field].default
        rows.append(
            Option(
                name=field,
                own=field not in common and field not in of_bases,
                bases=tuple(of_bases.get(field, ())),
                values=", ".join(bases) if field == "base" else describe(fields_of(cls)[field]),
                default="" if default is dataclasses.MISSING else default,
                usual=usual.get(field),
                meaning=_meaning(cls, field, bases),
            )
        )
    return rows


def _meaning(cls: Any, field: str, bases: Sequence[str]) -> str:
    """What an option means: by base, where that is not the same over all of them."""
    known: dict[str, Any] = {base: BASES[base].options for base in bases if field in BASES[base].fields}
    common = meanings(AttentionConfig).get(field)
    told = {base: meanings(options).get(field, "") for base, options in known.items()}
    told = {base: text for base, text in told.items() if text != common}
    if not told or (len(told) == len(bases) and len(set(told.values())) == 1):
        return meanings(cls).get(field, "")
    parts = [f"base {base}: " + LETTER.sub(r"\1, ", text) for base, text in told.items()]
    return "; ".join(parts if common is None else [common, *parts])


def _measured(name: str, given: Mapping[str, Any]) -> list[Cost] | None:
    """Of every layer; None where the values do not go together."""
    try:
        layers = layers_of(name, given, num_layers=LAYERS if name in schedules() else 1, tokens=TOKENS)
        shared: dict[str, Any] = {field: value for field, value in SIZES.items() if field not in given}
        return layer_costs(layers, tokens=TOKENS, **shared)
    except HeadloomError:
        return None


def _costs(name: str, usual: Mapping[str, Any], option: Option, start: list[Cost]) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    now = getattr(start[0].config, option.name, option.default if option.usual is None else option.usual)
    for choice in _others(name, option.name, now):
        for value in choice:
            other = _measured(name, {**usual, option.name: value})
            if other is not None:
                found[str(value).lower() if isinstance(value, bool) else str(value)] = _ratios(other, start)
                break
    return found


def _others(name: str, field: str, now: Any) -> list[list[Any]]:
    """What to try instead, each with what to take where that is refused: the others of a choice, twice a size."""
    cls = next(cls for cls in option_classes(name) if field in fields_of(cls))
    if field == "base":
        return [[base] for base in cls.bases if base != now]
    kinds = members(fields_of(cls)[field])
    if bool in kinds:
        return [[not now]]
    if int in kinds:
        return [[TOKENS // 16, 1] if now is None else [2 * now, 2 * now + 1, now // 2]]
    return [[kind] for kind in kinds if isinstance(kind, str) and kind != now]


def _ratios(other: list[Cost], start: list[Cost]) -> dict[str, float]:
    """Averages over a layer, in those of `start`."""

    def average(layers: list[Cost], quantity: str) -> float:
        return sum(getattr(layer, quantity) for layer in layers) / len(layers)

    quantities = {"parameters": "parameters", "FLOPs": "flops_exact", "cache": "cache_bytes"}
    found = {}
    for words, quantity in {**quantities, "scores": "core_flops_exact"}.items():
        before, after = average(start, quantity), average(other, quantity)
        if quantity == "cache_bytes":
            before, after = (
                before + average(start, "cache_constant_bytes"),
                after + average(other, "cache_constant_bytes"),
            )
        found[words] = after / before if before else 1.0
    return found


def markdown() -> str:
    """The second half of docs/mechanisms.md."""
    lines = [
        "## Options of all mechanisms",
        "",
        "`headloom list NAME` prints those that a mechanism has a use for, its bases, and what another value costs. On "
        "the command line None is written `none`.",
        "",
        *_table(_common()),
    ]
    mechanisms_over = {
        name: [each for each, info in mechanisms().items() if name in info.config_cls.bases] for name in BASES
    }
    for name, base in BASES.items():
        if base.fields and not issubclass(base.options, AttentionConfig):
            lines += ["", f"## Options of base `{name}`", "", f"Of {_listed(mechanisms_over[name])}.", ""]
            lines += _table([option for option in _of_class(base.options, {}) if option.name in base.fields])
    for name in [*mechanisms(), *schedules()]:
        own = [option for cls in option_classes(name)[:1] for option in _of_class(cls, {}) if option.own]
        if own:
            lines += ["", f"## Options of `{name}`", "", *_table(own)]
    return "\n".join(lines) + "\n"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _common() -> list[Option]:
    """Those of all mechanisms, over every base that one of them has."""

    class Common(AttentionConfig):
        bases = tuple(dict.fromkeys(base for info in mechanisms().values() for base in info.config_cls.bases))

    return _of_class(Common, {})


def _table(rows: list[Option]) -> list[str]:
    body = [(f"`{row.name}`", row.values, "" if row.default == "" else f"`{row.default}`", row.meaning) for row in rows]
    return [table_line(cells) for cells in (("option", "values", "default", "meaning"), ("---",) * 4, *body)]
