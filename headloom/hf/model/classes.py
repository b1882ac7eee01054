"""The model classes, made on demand: `HeadloomLlamaForCausalLM` for `LlamaForCausalLM`, and so for every head.

They are attributes of this file once made, and are made when asked for by name, so that pickle and copy find them.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.hf.model.config import PREFIX, config_class
from headloom.hf.model.family import Family, families, family_named
from headloom.hf.model.mixin import Graft
from headloom.hf.model.stated import preparing


@functools.cache
def model_class(family_name: str, head: Any) -> Any:
    """`HeadloomLlamaForCausalLM` for LlamaForCausalLM. The suffix matters: transformers finds the loss by it."""
    family = family_named(family_name)
    inner: Any = family.head_classes()["AutoModel"]
    body = {
        "__module__": __name__,
        "__doc__": f"{head.__name__} whose attention is Headloom's; see `headloom.hf.model.mixin.Graft`.",
        "config_class": config_class(family_name),
        "family": family,
        "inner_class": None if head is inner else model_class(family_name, inner),
        "forward": _forward(head),
        "forward_names": tuple(inspect.signature(head.forward).parameters)[1:],
    }
    if head.can_generate():
        body["prepare_inputs_for_generation"] = preparing(head)
    made = type(f"{PREFIX}{head.__name__}", (Graft, head), body)
    _convert_as(family, head, made)
    return globals().setdefault(made.__name__, made)


def _convert_as(family: Family, head: Any, made: type) -> None:
    """Have the loader rename checkpoints for our class as for the family's: it goes by the class's name, or by
    model_type in transformers' own classes."""
    from transformers.conversion_mapping import (
        get_checkpoint_conversion_mapping,
        register_checkpoint_conversion_mapping,
    )

    renamings = get_checkpoint_conversion_mapping(head.__name__)
    if renamings is None and head is family.head_classes().get("AutoModel"):  # the others hold this one inside
        renamings = get_checkpoint_conversion_mapping(family.name)
    if renamings is not None:
        register_checkpoint_conversion_mapping(made.__name__, renamings, overwrite=True)


@functools.cache
def register_heads(family: Family) -> None:
    """Tell transformers' Auto classes about a family's grafted heads."""
    from transformers.models import auto

    for auto_name, head in family.head_classes().items():
        getattr(auto, auto_name).register(config_class(family.name), model_class(family.name, head), exist_ok=True)


def grafted_class(model: Any) -> Any:
    """The grafted class of a model of a family we know. Raises HeadloomError if its head cannot be grafted."""
    family = family_named(getattr(model.config, "model_type", None))
    heads = family.head_classes()
    if type(model) not in heads.values():
        names = ", ".join(sorted(head.__name__ for head in heads.values()))
        raise HeadloomError(f"{type(model).__name__} cannot be grafted. Of family '{family.name}' these can: {names}")
    register_heads(family)
    head: Any = type(model)
    return model_class(family.name, head)


def _forward(head: type) -> Any:
    """`Graft.forward` with the head's own signature (Trainer and generate read it) and `documents`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return Graft.forward(self, *args, **kwargs)

    signature = inspect.signature(head.forward)  # type: ignore[attr-defined]
    parameters = list(signature.parameters.values())
    documents = inspect.Parameter("documents", inspect.Parameter.KEYWORD_ONLY, default=None)
    last = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*(p for p in parameters if p not in last), documents, *last]
    )
    forward.__doc__ = f"As `{head.__name__}.forward`; `documents` as in `Graft.forward`."
    return forward


def __getattr__(name: str) -> type:
    """A class that this process has not made yet, for pickle."""
    rest = name.removeprefix(PREFIX)
    if name.startswith(PREFIX):
        for family in families().values():
            if rest == family.config_class().__name__:
                register_heads(family)
                return config_class(family.name)
            for head in family.head_classes().values():
                if rest == head.__name__:
                    return model_class(family.name, head)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
