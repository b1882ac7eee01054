"""Errors that users see: one line that says what was given, what is allowed, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class HeadloomError(ValueError):
    """The call was wrong. Commands print the line and exit with status 2."""


class RunError(HeadloomError):
    """A run failed although the call was right (a NaN loss, say). Commands exit with status 1."""


def near(name: str, allowed: Iterable[str]) -> str:
    """`" Did you mean 'iha'?"` for a name that is similar to an allowed one, else an empty string."""
    matches = difflib.get_close_matches(str(name), list(allowed), n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def need_module(value: Any) -> None:
    """Raise HeadloomError unless `value` is a PyTorch module, recognised by its methods: `core` imports no torch."""
    if isinstance(value, type) or not hasattr(value, "named_modules"):
        raise HeadloomError(f"give a model or an attention (a torch.nn.Module), not {value!r}")


def unknown(kind: str, name: str, allowed: Iterable[str]) -> HeadloomError:
    """The error for a name under which nothing is registered. kind: "mechanism", for the message."""
    names = sorted(allowed)
    return HeadloomError(f"unknown {kind} '{name}'.{near(name, names)} Known: {', '.join(names)}")
