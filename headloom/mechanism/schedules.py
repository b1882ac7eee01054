"""Layer schedules: which attention stands in which layer of a model.

A schedule is a pattern, repeated over the depth and cut off at the last layer. A pattern is a list of specs, each a
mechanism's name or (name, options), a window of its own among the options if it likes; or it has a name and options:

hybrid - the hybrid of the IHA paper (arXiv:2602.21371): four local IHA layers with window W = N / (2 P^2) real tokens
in a context of N, then one global mha layer. In N = 8192 the window is 1024, 256, 64 for P = 2, 4, 8. Counted as the
paper does, in full rectangles of queries by keys, a local layer costs P^2 N W = N^2 / 2 pairs, so the average is 3/5 of
global mha; counted by visible pairs of tokens, below the diagonal, it is 0.95, 0.99, 1.00.

pattern - any pattern, written as its option `layers`: [[iha, {pseudo_heads: 2}], mha].

It is in this folder because a named schedule names mechanisms, and no folder above may.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from headloom.contract.common import need
from headloom.core.config import Config, check_names, fields_of, unknown_option
from headloom.core.errors import HeadloomError, unknown
from headloom.core.registry import Registry

Spec = tuple[str, dict[str, Any]]


class Schedule(abc.ABC):
    """A named pattern. `config_cls` are its own options; all others go to every layer whose mechanism has them."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    summary: ClassVar[str]
    config_cls: ClassVar[Any]
    mechanisms: ClassVar[tuple[str, ...]]

    @abc.abstractmethod
    def pattern(self, own: Any, num_layers: int, tokens: int | None) -> list[Spec]:
        """One period for a model of `num_layers` in a context of `tokens`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig(Config):
    """Options of the hybrid."""

    pseudo_heads: Annotated[int, "P: pseudo-heads of each head in the local layers"] = 2
    window: Annotated[
        int | None, "W: tokens that a local layer sees. None: N / (2 P^2) in a context of N, rounded down"
    ] = None
    local: Annotated[
        int | None, "local layers before each global one. None: four, as the paper; in a shallow model all but one"
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("pseudo_heads", "window", "local"):
            value = getattr(self, name)
            need(value is None or value >= 1, f"{name} must be at least 1, not {value}")


class Hybrid(Schedule):
    name = "hybrid"
    title = "Local IHA layers and global multi-head layers"
    paper = "arXiv:2602.21371"
    summary = "four IHA layers with window N/(2 P^2), then one mha layer that sees all"
    config_cls = HybridConfig
    mechanisms = ("iha", "mha")

    def pattern(self, own: HybridConfig, num_layers: int, tokens: int | None) -> list[Spec]:
        need(num_layers >= 2, f"hybrid needs at least 2 layers, a local and a global one, not {num_layers}")
        local = min(4, num_layers - 1) if own.local is None else own.local
        P, window = own.pseudo_heads, own.window
        if window is None:
            need(tokens is not None, "hybrid's window is N/(2 P^2): give tokens, the context N, or a window")
            window = (tokens or 0) // (2 * P * P)
            need(
                window >= 1,
                f"hybrid's window N/(2 P^2) is below 1 for a context of {tokens} and pseudo_heads {P}: "
                "give fewer pseudo_heads, a longer context, or a window",
            )
        return [("iha", {"pseudo_heads": P, "window": window})] * local + [("mha", {})]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatternConfig(Config):
    """Options of the pattern."""

    layers: Annotated[
        list[Any], "one period, repeated over the depth: for each layer a mechanism's name, or [name, {option: value}]"
    ] = dataclasses.field(default_factory=list)


class Pattern(Schedule):
    name = "pattern"
    title = "A pattern of layers, written one by one"
    paper = ""
    summary = "layers=[[iha, {pseudo_heads: 2}], mha]: one period, repeated over the depth"
    config_cls = PatternConfig
    mechanisms = ()

    def pattern(self, own: PatternConfig, num_layers: int, tokens: int | None) -> list[Spec]:
        return _places_of(own.layers, {})


_SCHEDULES: Registry[Schedule] = Registry("schedule")
for _cls in (Hybrid, Pattern):
    _SCHEDULES.add(_cls.name, _cls())


def schedules() -> dict[str, Schedule]:
    """The named schedules."""
    return dict(sorted(_SCHEDULES.items()))


def option_classes(name: str) -> tuple[Any, ...]:
    """The config classes whose fields are options of `name`, a mechanism or schedule; the first that has it counts."""
    from headloom.mechanism.registry import mechanisms

    known = mechanisms()
    if name in known:
        return (known[name].config_cls,)
    if name not in _SCHEDULES:
        raise unknown("mechanism", name, {**known, **_SCHEDULES})
    found = _SCHEDULES[name]
    return (found.config_cls, *(known[part].config_cls for part in found.mechanisms))


def as_spec(given: Any) -> Spec:
    """A mechanism's name or (name, options), as the latter."""
    if isinstance(given, str):
        return given, {}
    pair = tuple(given) if isinstance(given, Sequence) else ()
    if len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], Mapping):
        return pair[0], dict(pair[1])
    raise HeadloomError(f"a layer's attention must be a mechanism's name or (name, options), not {given!r}")


def whole(name: str, value: Any) -> None:
    """Refuse what is not a whole number of at least 1."""
    need(type(value) is int, f"{name} must be a whole number, not {value!r}")
    need(value >= 1, f"{name} must be at least 1, not {value}")


def pattern_of(name: str, options: Mapping[str, Any], *, num_layers: int, tokens: int | None = None) -> list[Spec]:
    """One period of `name`: a mechanism's is itself."""
    classes = option_classes(name)
    if name not in _SCHEDULES:
        return [(name, dict(options))]
    for option in options:
        if not any(option in fields_of(cls) for cls in classes):
            raise unknown_option(option, classes, of=name)
    found = _SCHEDULES[name]
    mine = fields_of(found.config_cls)
    own = found.config_cls(**{key: value for key, value in options.items() if key in mine})
    rest = {key: value for key, value in options.items() if key not in mine}
    fields = {part: fields_of(cls) for part, cls in zip(found.mechanisms, classes[1:], strict=True)}
    return [
        (part, {**{key: value for key, value in rest.items() if key in fields[part]}, **given})
        for part, given in found.pattern(own, num_layers, tokens)
    ]


def over_depth(pattern: Sequence[Spec], num_layers: int) -> list[Spec]:
    """The pattern repeated over `num_layers` and cut off at the last. A model shallower than one period is refused."""
    whole("num_layers", num_layers)
    if len(pattern) > num_layers:
        raise HeadloomError(
            f"a pattern of {len(pattern)} layers does not fit a model of {num_layers}: give a deeper model, or a "
            "shorter pattern"
        )
    return [pattern[i % len(pattern)] for i in range(num_layers)]


def layers_of(name: str, options: Mapping[str, Any], *, num_layers: int, tokens: int | None = None) -> list[Spec]:
    """The specs of all layers of a model whose attention is `name`, a mechanism or a schedule."""
    return over_depth(pattern_of(name, options, num_layers=num_layers, tokens=tokens), num_layers)


def schedule(
    what: str | Spec | Sequence[str | Spec],
    *,
    num_layers: int,
    tokens: int | None = None,
    windows: Sequence[int | None] | None = None,
    **options: Any,
) -> list[Spec]:
    """One spec a layer, for `hl.build_model`.

    Args:
        what: a schedule's name (with `options`), or a pattern: a list of mechanisms' names or (name, options).
        tokens: the context, from which a named schedule takes its windows.
        windows: one for each place of the pattern, None = none; `options` go to every place.

    >>> layers = schedule(["iha"] * 4 + ["mha"], num_layers=10, windows=[64] * 4 + [None], num_kv_heads=4)
    >>> layers[5], layers[9]
    (('iha', {'num_kv_heads': 4, 'window': 64}), ('mha', {'num_kv_heads': 4, 'window': None}))
    >>> schedule("hybrid", num_layers=26, tokens=8192, pseudo_heads=4)[:5:4]
    [('iha', {'pseudo_heads': 4, 'window': 256}), ('mha', {})]
    """
    whole("num_layers", num_layers)
    if tokens is not None:
        whole("tokens", tokens)
    one: Any = (what, {}) if isinstance(what, str) else what
    if not isinstance(one, Sequence):
        raise HeadloomError(f"give a schedule's name, or a list of mechanisms' names or (name, options), not {one!r}")
    if isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str) and isinstance(one[1], Mapping):
        pattern = pattern_of(one[0], {**one[1], **options}, num_layers=num_layers, tokens=tokens)
    else:
        pattern = _places_of(one, options)
    if windows is not None:
        if not isinstance(windows, Sequence):
            raise HeadloomError(f"windows must be a list, one for each place of the pattern, not {windows!r}")
        if len(windows) != len(pattern):
            raise HeadloomError(
                f"{len(windows)} windows came for a pattern of {len(pattern)} layers: give one for each"
            )
        pattern = [(name, {**own, "window": window}) for (name, own), window in zip(pattern, windows, strict=True)]
    for name, own in pattern:
        check_names(option_classes(name)[0], own, of=name)
    return over_depth(pattern, num_layers)


def _places_of(layers: Sequence[Any], options: Mapping[str, Any]) -> list[Spec]:
    """The places of a pattern that is written one by one, with `options` under each one's own."""
    if not layers:
        raise HeadloomError("an empty pattern: give at least one mechanism")
    found = []
    for layer in layers:
        name, own = as_spec(layer)
        if name in _SCHEDULES:
            raise HeadloomError(f"'{name}' is a schedule of many layers: it cannot be one place of a pattern")
        check_names(option_classes(name)[0], own, of=name)
        found.append((name, {**options, **own}))
    return found


def places(indices: Sequence[int]) -> str:
    """Layer indices as people write them.

    >>> places([0, 1, 2, 3, 5, 6])
    '0-3,5-6'
    """
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
