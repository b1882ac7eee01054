"""A user's own attention module, by import path, as a subject beside the mechanisms.

`package.module:Class` or `path/to/file.py:Class`, then options for its constructor after colons:
`mine.attention:MyAttention:dim=512:dropout=0.0`. Of the sizes, those are passed that the constructor names
(hidden_size, num_heads, num_kv_heads, head_dim). It is called with x (B, T, D), nothing else, and gives (B, T, D), or a
tuple that begins with it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headloom.bench.asked import Sizes, read_against
from headloom.bench.setting import Setting
from headloom.bench.subjects import Subject, first
from headloom.core.errors import HeadloomError, near


def load(text: str) -> tuple[type[nn.Module], dict[str, Any]]:
    """The class and its options. Raises HeadloomError for a path that does not lead to a module class."""
    place, name, options = read_against(text)
    module = _import(place)
    cls = getattr(module, name, None)
    if cls is None:
        known = [key for key, value in vars(module).items() if inspect.isclass(value)]
        raise HeadloomError(f"'{place}' has no '{name}'.{near(name, known)}")
    if not (inspect.isclass(cls) and issubclass(cls, nn.Module)):
        raise HeadloomError(f"'{place}:{name}' is no torch.nn.Module class, but {cls!r}")
    return cls, options


def _import(place: str) -> Any:
    with _working_folder_first():
        try:
            return _run_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        except Exception as error:  # whatever a user's file may raise
            raise HeadloomError(
                f"'{place}' cannot be imported: {type(error).__name__}: {error}. Give a module on the path, or a "
                "file ending in .py"
            ) from None


def _run_file(path: Path) -> Any:
    name = f"_against_{path.stem}"  # its stem alone might be a library's name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@contextmanager
def _working_folder_first() -> Iterator[None]:
    """An installed command does not see the folder it is called in; `python -m` does."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


def build_theirs(text: str, sizes: Sizes, setting: Setting) -> Subject:
    """The user's module on the setting's device, in its type. Raises HeadloomError if it cannot be built so."""
    cls, options = load(text)
    try:
        parameters = inspect.signature(cls.__init__).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    given = {name: value for name, value in sizes.given().items() if name in parameters and name != "rope_theta"}
    torch.manual_seed(setting.seed)
    try:
        module = cls(**{**given, **options})
    except Exception as error:
        passed = ", ".join(f"{name}={value!r}" for name, value in {**given, **options}.items()) or "nothing"
        wanted = ", ".join(name for name in parameters if name != "self")
        raise HeadloomError(
            f"{cls.__name__} cannot be built from {passed}: {error}. It takes ({wanted}): give what is missing after "
            f"colons, {text}:name=value"
        ) from None
    return Subject(label=text, module=module.to(setting.device, setting.type))


@torch.no_grad()
def output_of(subject: Subject, x_BTD: Tensor) -> Tensor:
    """What the module makes of x. Raises HeadloomError if it does not take x (B, T, D) alone and give its like."""
    try:
        out = first(subject.module.eval()(x_BTD))
    except Exception as error:
        raise HeadloomError(
            f"{subject.label} cannot be called with x {tuple(x_BTD.shape)} alone: {type(error).__name__}: {error}. "
            "Wrap it in a module whose forward takes x (B, T, D)"
        ) from None
    if not isinstance(out, Tensor) or out.shape != x_BTD.shape:
        found = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise HeadloomError(f"{subject.label} must give the shape of its input, {tuple(x_BTD.shape)}, not {found}")
    return out


def compare_outputs(mine: Subject, theirs: Subject, x_BTD: Tensor) -> dict[str, Any]:
    """The largest difference of outputs, absolute and in the largest output, once the weights of `mine` are copied
    (another form of `mine` has them already).

    Where names or shapes do not fit nothing is copied, the difference is None, and "reason" says what does not fit.
    """
    reason = ""
    if theirs.form_of is None:
        attention = mine.attention
        reason = f"{mine.label} is no single layer" if attention is None else _copy(attention, theirs.module)
    if reason:
        return {"variant": mine.label, "max_difference": None, "relative": None, "reason": reason}
    with torch.no_grad():
        ours = mine.module.eval()(x_BTD).float()
    difference = float((ours - output_of(theirs, x_BTD).float()).abs().max())
    return {
        "variant": mine.label,
        "max_difference": difference,
        "relative": difference / float(ours.abs().max()),
        "reason": "",
    }


def _copy(source: nn.Module, target: nn.Module) -> str:
    """Copy the weights, or say why not."""
    ours, theirs = source.state_dict(), target.state_dict()
    for what, names in (("lacks", ours.keys() - theirs.keys()), ("has", theirs.keys() - ours.keys())):
        if names:
            return f"weights not copied: it {what} {', '.join(sorted(names))}"
    for name, tensor in ours.items():
        if tensor.shape != theirs[name].shape:
            return f"weights not copied: {name} is {tuple(theirs[name].shape)}, not {tuple(tensor.shape)}"
    target.load_state_dict(ours)
    return ""
