"""A second model on the same tensors: its modules, hooks, flags and configs are its own, its weights are not."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import Tensor, nn

from headloom.core.errors import HeadloomError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CAPTURING, _CAPTURED = "transformers.utils.output_capturing", "_output_capturing_hooks_installed"
"""transformers' own hooks for `output_hidden_states` and the like, and its mark on a model that has them: it installs
them when they are first needed."""
_COMPILED = "_compiled_call"
"""What `generate` has compiled: a function that calls the original. It is compiled again when it is needed."""


def sharing_copy(model: Any, *, classes: Mapping[nn.Module, Any] | None = None, config: Any = None) -> Any:
    """A deep copy of `model` in which every tensor that a module holds is the same object as in `model`.

    Whatever refers to a module (a hook's method, a tied weight's second owner) refers to its copy. Nothing of `model`
    is changed.

    Args:
        classes: modules whose copy is of another class, which must hold the same state.
        config: stands wherever `model.config` stood (None: a copy of it).
    Raises:
        HeadloomError: an attribute that Python cannot copy, by its name.
    """
    memo: dict[int, Any] = {}  # what deepcopy is to take for an object of this id
    for module in model.modules():
        held = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        memo.update({id(x): x for x in held if isinstance(x, Tensor)})
    if config is not None:
        memo[id(model.config)] = config
    # a class's own `__init__` would allocate weights
    made: dict[nn.Module, Any] = {module: cls.__new__(cls) for module, cls in (classes or {}).items()}
    memo.update({id(module): twin for module, twin in made.items()})
    before = dict(memo)
    try:
        for module, twin in made.items():
            twin.__setstate__(copy.deepcopy(module.__getstate__(), memo))
        copied = copy.deepcopy(model, memo)
    except Exception as error:  # whatever an attribute's own code raises
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise HeadloomError(
            f"the model's {_not_copied(model, before)} cannot be copied ({reason}), and the new model has modules, "
            "hooks and attributes of its own: delete it first, and set it on both models afterwards"
        ) from error
    for twin in made.values():
        vars(twin).pop("forward", None)  # the old class's (`check_calls`)
    _drop_hooks(copied, capturing_alone=True)
    return copied


def _drop_hooks(model: nn.Module, *, capturing_alone: bool) -> None:
    for module in model.modules():
        for name in (_CAPTURED, _COMPILED):
            vars(module).pop(name, None)
        for hooks in (getattr(module, name) for name in _HOOKS):
            for key, hook in list(hooks.items()):
                if _is_capturing(hook) or not capturing_alone:
                    del hooks[key]


def _is_capturing(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _CAPTURING


def _not_copied(model: nn.Module, memo: dict[int, Any]) -> str:
    """The path of the first attribute that Python cannot copy."""
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name == "_modules":
                continue  # looked into by itself
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                return f"{path}.{name}".lstrip(".")
    return type(model).__name__


def without_hooks(model: Any) -> Any:
    """A copy of `model` in evaluation mode on the same tensors that runs no hook, to be called and dropped: neither
    the model's flags nor anything that its hooks write to see these calls."""
    twin = sharing_copy(model)
    _drop_hooks(twin, capturing_alone=False)
    return twin.eval()


def check_calls(model: nn.Module) -> None:
    """Refuse what calls modules in another way than their classes say, since a copy would not follow.

    Raises: HeadloomError for a model that accelerate has spread over devices or whose `forward` was replaced.
    """
    for path, module in model.named_modules():
        if hasattr(module, "_hf_hook"):
            raise HeadloomError(
                "a model spread over devices by accelerate cannot be grafted or folded: load it on one device"
            )
        forward = vars(module).get("forward")
        own = isinstance(forward, MethodType) and forward.__self__ is module
        if own and module in (model, getattr(model, "base_model", None)):  # these two get another class
            own = any(forward.__func__ is function for function in _wrapped(type(module).forward))
        if forward is not None and not own:
            raise HeadloomError(
                f"the forward of {path or 'the model'} was replaced by another function (accelerate's prepare, "
                "torch.compile, a patch): undo that (accelerate: unwrap_model(model, keep_fp32_wrapper=False)), and do "
                "it again with the new model"
            )


def _wrapped(function: Any) -> Iterator[Any]:
    """A function and those that it was made from by decorators: accelerate puts one of these back."""
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def check_hooks(attention: nn.Module, where: str) -> None:
    """Refuse hooks on an attention that is replaced. Raises HeadloomError. transformers' own may go."""
    hooks = [hook for name in _HOOKS for hook in getattr(attention, name).values()]
    if not all(map(_is_capturing, hooks)):
        raise HeadloomError(
            f"{where} has hooks, and it is replaced: remove them, and register them on the new model's attention"
        )
