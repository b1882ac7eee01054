"""What has to happen when other modules are first imported, and not before: `import headloom` itself stays light.

- After transformers' table of model types: register headloom's models (`headloom.hf.registration`), so that
  `AutoModelForCausalLM.from_pretrained` loads them.
- After `headloom.ops.rotary`: offer it transformers' scalings, imported when the first one is asked for. The floors
  below `hf` know nothing of transformers.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def _register_models() -> None:
    importlib.import_module("headloom.hf.registration")


def _offer_scalings() -> None:
    def provide(*args: Any) -> Any:
        return importlib.import_module("headloom.hf.model.rope").provide(*args)

    sys.modules["headloom.ops.rotary"].register_scalings(provide)


_AFTER: dict[str, Callable[[], None]] = {
    "transformers.models.auto.configuration_auto": _register_models,
    "headloom.ops.rotary": _offer_scalings,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader, then: Callable[[], None]):
        self.inner, self.then = inner, then

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self.inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.inner.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self.inner
        self.then()


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self) -> None:
        self.waiting: dict[str, Callable[[], None]] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        then = self.waiting.pop(fullname, None)
        if then is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, then)
        return spec


def install() -> None:
    """Do at once what is due for modules already imported, the rest when they are."""
    finder = _Finder()
    for name, then in _AFTER.items():
        if name in sys.modules:
            then()
        else:
            finder.waiting[name] = then
    sys.meta_path.insert(0, finder)
