"""Every tensor initialised by (seed, its name): runs then share what they can share.

One global random stream shares nothing: with feed-forward width 64 and 63 the same seed gives no equal tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


def derive_seed(seed: int, name: str) -> int:
    """A 63-bit seed for a name; stable over machines and versions."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:8], "big") >> 1


class _ByName(TorchFunctionMode):
    def __init__(self, names: dict[int, str], seed: int):
        super().__init__()
        self.names, self.seed = names, seed

    def __torch_function__(
        self, func: Any, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        name = self.names.get(id(target))
        if name is not None and getattr(func, "__name__", "").endswith("_"):  # in place: normal_, nn.init.uniform_, ...
            torch.manual_seed(derive_seed(self.seed, name))
        return func(*args, **kwargs)


@contextlib.contextmanager
def seeded_by_name(module: nn.Module, seed: int) -> Iterator[None]:
    """Inside, an in-place random draw into a parameter of `module` comes from a generator seeded by (seed, name).

    Equal name and shape then means equal values. Draws into other tensors follow the global stream, which is set from
    `seed`; the caller's random state is restored at the end.
    """
    names = {id(p): name for name, p in module.named_parameters(remove_duplicate=False)}
    with torch.random.fork_rng(devices=[]), _ByName(names, seed):
        torch.manual_seed(derive_seed(seed, ""))
        yield
