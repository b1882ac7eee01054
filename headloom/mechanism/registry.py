"""The registered mechanisms, and building them by name: `hl.attention` stands here."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from types import ModuleType
from typing import Any, Literal

from torch import Tensor

from headloom.contract.attention import Attention
from headloom.contract.bases import BASES
from headloom.contract.bases.base import options_of
from headloom.contract.config import AttentionConfig
from headloom.contract.folding import Folding
from headloom.contract.maps import Maps
from headloom.core.config import check_names, fields_of
from headloom.core.errors import HeadloomError
from headloom.core.registry import Registry


@dataclasses.dataclass(frozen=True)
class MechanismInfo:
    """What the registry knows of a mechanism: its name, title, paper, one line, module and config classes."""

    name: str
    title: str
    paper: str
    summary: str
    cls: type[Attention[AttentionConfig]]
    config_cls: type[AttentionConfig]


_MECHANISMS: Registry[MechanismInfo] = Registry("mechanism")


def register(cls: type[Attention[AttentionConfig]]) -> type[Attention[AttentionConfig]]:
    """Register a mechanism class. Files in this folder are registered by being there; others may call it."""
    if not (inspect.isclass(cls) and issubclass(cls, Attention)):
        raise TypeError(f"a mechanism is a subclass of headloom.mechanism.Attention, not {cls!r}")
    lines = {key: getattr(cls, key, None) for key in ("name", "title", "paper", "summary")}
    for key, line in lines.items():
        if not isinstance(line, str) or not line:
            raise TypeError(f"mechanism {cls.__name__} needs a text as its class attribute '{key}'")
    known = _MECHANISMS.get(cls.name) if cls.name in _MECHANISMS else None
    if known is None or known.cls is not cls:
        _MECHANISMS.add(cls.name, MechanismInfo(**lines, cls=cls, config_cls=cls.config_cls))  # type: ignore[arg-type]
    return cls


def _register_module(module: ModuleType) -> None:
    for item in vars(module).values():
        if inspect.isclass(item) and issubclass(item, Attention) and "name" in vars(item):
            register(item)


def register_folder(package: ModuleType) -> None:
    """Register the mechanisms of every file of a package."""
    for found in pkgutil.iter_modules(package.__path__):
        _register_module(importlib.import_module(f"{package.__name__}.{found.name}"))


def mechanisms() -> dict[str, MechanismInfo]:
    """All registered mechanisms by name.

    >>> mechanisms()["iha"].paper
    'arXiv:2602.21371'
    """
    return dict(sorted(_MECHANISMS.items()))


def make_config(name: str, **options: Any) -> AttentionConfig:
    """The config of the mechanism `name`; unknown names and options are refused with the near ones."""
    if not isinstance(name, str):
        raise HeadloomError(f"a mechanism's name must be a text (hl.mechanisms() has them), not {name!r}")
    config_cls = _MECHANISMS[name].config_cls
    check_names(config_cls, options, of=name)
    missing = [field for field in ("hidden_size", "num_heads") if field not in options]
    if missing:
        raise HeadloomError(f"{name} needs {' and '.join(missing)}")
    return config_cls(**options)


def foldable(name: str, **options: Any) -> Folding:
    """Which parts of a mechanism merge into plain weights: `str()` of it is a sentence.

    >>> str(foldable("iha", hidden_size=8, num_heads=2, pseudo_heads=1, collapse="mean"))[:52]
    'q_mix folds into W_Q: only an optimiser effect; k_mi'
    """
    return make_config(name, **options).folding


def layer_config(name: str, shared: Mapping[str, Any], options: Mapping[str, Any]) -> AttentionConfig:
    """The config of a layer in a model: of what the model gives all its layers, what the mechanism has a use for, and
    the layer's own options, which win.

    An option of a base that the mechanism cannot stand on may be there as None: folders written when every mechanism
    had the options of all bases say so.
    """
    config_cls: Any = _MECHANISMS[name].config_cls
    foreign = set(options_of(BASES)) - set(fields_of(config_cls))
    own = {option: value for option, value in options.items() if value is not None or option not in foreign}
    return make_config(name, **{**taken(name, shared), **own})


def built_config(name: str, facts: Mapping[str, Any], options: Mapping[str, Any]) -> AttentionConfig:
    """The config of a layer in a model that is built around the mechanism `name`: of the facts about the attention that
    the model's config describes those that it adopts, and the layer's own options, which win."""
    return make_config(name, **{**_MECHANISMS[name].config_cls.adopted(facts, options), **options})


def taken(name: str, shared: Mapping[str, Any]) -> dict[str, Any]:
    """`shared` without the fields that mean nothing to the mechanism `name`."""
    without = _MECHANISMS[name].config_cls.without
    return {field: value for field, value in shared.items() if field not in without}


def build_from_config(config: AttentionConfig, layer_index: int = 0) -> Attention[AttentionConfig]:
    """The module that a config describes."""
    for info in _MECHANISMS.values():
        if type(config) is info.config_cls:
            return info.cls(config, layer_index)
    raise TypeError(f"no registered mechanism takes a {type(config).__name__}")


def maps(attention: Attention[AttentionConfig], x_BTD: Tensor, **call: Any) -> Maps:
    """Every attention pattern of one layer, and the effective per-token map: `Attention.maps`."""
    if not isinstance(attention, Attention):
        raise HeadloomError(
            f"hl.maps takes one attention and its input (B, T, D), not a {type(attention).__name__}: give what "
            "hl.attention made, or of a grafted model one layer's attention, as in "
            "hl.maps(model.model.layers[0].self_attn, hidden_states)"
        )
    return attention.maps(x_BTD, **call)


class _Own:
    """The default of an option that is left to the mechanism."""

    def __repr__(self) -> str:
        return "<the mechanism's>"


_OWN: Any = _Own()


def attention(
    name: str | AttentionConfig,
    hidden_size: int = _OWN,
    num_heads: int = _OWN,
    *,
    num_kv_heads: int | None = _OWN,
    head_dim: int | None = _OWN,
    value_dim: int | None = _OWN,
    causal: bool = _OWN,
    window: int | None = _OWN,
    dropout: float = _OWN,
    qkv_bias: bool = _OWN,
    out_bias: bool = _OWN,
    qk_norm: Literal["head", "width"] | None = _OWN,
    norm_eps: float = _OWN,
    rope_theta: float | None = _OWN,
    rotary_dim: int | None = _OWN,
    rope_scaling: dict[str, Any] | None = _OWN,
    softcap: float | None = _OWN,
    projection: Literal["linear", "bit", "packed"] = _OWN,
    base: str = _OWN,
    score: Literal["softmax", "identity", "hard"] = _OWN,
    scale: float | None = _OWN,
    **options: Any,
) -> Attention[Any]:
    """An attention module: `attention("iha", hidden_size=256, num_heads=8, pseudo_heads=4)`, or of a whole config.

    The module takes x (B, T, D) and gives (B, T, D); `help(type(module).forward)` has its other arguments.

    Args:
        name: of a mechanism; `headloom list`, or `hl.mechanisms()`, has them. Or a mechanism's config, which says all.
        hidden_size: D. num_heads: H. These two must be given. The others are the mechanism's where they are not:
            `headloom list NAME` prints what each means, may be and costs.
        options: the mechanism's own (pseudo_heads of iha, say), and sizes of its base.
    Raises:
        HeadloomError: an unknown name or option (with the near ones), a wrong value, sizes that do not go together.
    """
    common = {field: value for field, value in locals().items() if field in _COMMON and value is not _OWN}
    if isinstance(name, AttentionConfig):
        if common or options:
            raise HeadloomError(
                f"{', '.join((*common, *options))} beside a {type(name).__name__}, which says all: give "
                "config.replace(...), or a mechanism's name and its options"
            )
        return build_from_config(name)
    return build_from_config(make_config(name, **common, **options))


_COMMON = tuple(name for name in inspect.signature(attention).parameters if name not in ("name", "options"))
