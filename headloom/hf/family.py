"""What the house knows about a model family; one small file each in `headloom/hf/families/`, found by walking."""

from __future__ import annotations

import abc
import functools
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from headloom.core.errors import HeadloomError


class Family(abc.ABC):
    """Where a transformers family keeps its attention and what its config says about it.

    A family file defines one subclass and `FAMILY = ThatClass()`. It imports transformers' modelling code inside the
    methods only, so that listing the families costs nothing.
    """

    name = ""
    """transformers' `model_type`."""

    attention_name = "self_attn"
    """The attribute of a layer that holds its attention."""

    projections: ClassVar[dict[str, str]] = {
        "q_proj": "q_proj",
        "k_proj": "k_proj",
        "v_proj": "v_proj",
        "o_proj": "o_proj",
    }
    """Our projection -> the path of theirs inside the attention they come from."""

    @abc.abstractmethod
    def config_class(self) -> Any: ...

    @abc.abstractmethod
    def attention_class(self) -> type:
        """The class a layer's attention must have to be replaced (somebody else's replacement is refused)."""

    @abc.abstractmethod
    def head_classes(self) -> dict[str, type]:
        """Auto class name -> the family's class with that head, for every head that can be grafted."""

    @abc.abstractmethod
    def layers(self, model: Any) -> nn.ModuleList: ...

    @abc.abstractmethod
    def common(self, config: Any, index: int) -> dict[str, Any]:
        """The mechanism-independent fields of `AttentionConfig` for layer `index`, from the family's config."""

    def own_config(
        self, sizes: dict[str, Any], windows: Sequence[int | None], experts: Mapping[str, int]
    ) -> dict[str, Any]:
        """Fields of the family's config for a model of ours, from `sizes` as Llama's config names them.

        windows: every layer's; where the config can say it, transformers' cache drops what no layer can see any more.
        experts: "experts" and "experts_per_token" if given, for families that route tokens.
        Raises HeadloomError for a family that is only grafted.
        """
        raise HeadloomError(f"models of family '{self.name}' are grafted, not built here: load one and use hl.graft")


@functools.cache
def families() -> dict[str, Family]:
    """model_type -> family, for every file in `headloom/hf/families/`."""
    package = importlib.import_module("headloom.hf.families")
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(package.__path__):
        family = importlib.import_module(f"{package.__name__}.{module.name}").FAMILY
        if family.name in found:
            raise TypeError(f"family '{family.name}' is defined twice")
        found[family.name] = family
    return found


def family_named(name: Any) -> Family:
    """The family of a `model_type`. Raises HeadloomError that says how to add one."""
    known = families()
    if name not in known:
        raise HeadloomError(
            f"model family '{name}' is not known here. Known: {', '.join(sorted(known))}. "
            "A family is one file in headloom/hf/families/ that says where its attention is and how its config reads"
        )
    return known[name]


def attentions(family: Family, model: Any) -> list[nn.Module]:
    """The attention module of every layer, in order."""
    return [getattr(layer, family.attention_name) for layer in family.layers(model)]
