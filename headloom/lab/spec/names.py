"""Names and titles of mechanisms and schedules, read from their source: nothing is imported, so `list` starts at once.

The registry is the truth, and a test holds this against it. Where a class does not say its lines as literal texts, the
registry is asked itself.
"""

from __future__ import annotations

import ast
import sys
from functools import cache
from importlib.resources import files

from headloom.core.errors import unknown

LINES = ("name", "title", "paper", "summary")


def described() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """The lines of all mechanisms and of all schedules, by name."""
    if "headloom.mechanism" in sys.modules:  # and so there may be some that others registered
        return _registered()
    return _read()


def check_mechanism_name(name: str, *, schedules: bool = True) -> None:
    """Refuse what is neither a mechanism nor (with `schedules`) a schedule, with the near names."""
    mechanisms, others = described()
    names = [lines["name"] for lines in (*mechanisms, *(others if schedules else ()))]
    if name not in names:
        raise unknown("mechanism", name, names)


@cache
def _read() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    found: dict[bool, list[dict[str, str]]] = {False: [], True: []}
    for file in files("headloom").joinpath("mechanism").iterdir():
        if file.name.endswith(".py"):
            for node in ast.parse(file.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef) and "name" in (lines := _texts(node)):
                    if set(lines) != set(LINES):
                        return _registered()
                    found["Schedule" in map(ast.unparse, node.bases)].append(lines)
    mechanisms, schedules = (sorted(found[kind], key=lambda lines: lines["name"]) for kind in (False, True))
    return mechanisms, schedules


def _texts(node: ast.ClassDef) -> dict[str, str]:
    """The class attributes among LINES that are literal texts, assigned one by one or as a tuple."""
    texts: dict[str, str] = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                pairs = [(target, statement.value)]
                if isinstance(target, ast.Tuple) and isinstance(statement.value, ast.Tuple):
                    pairs = list(zip(target.elts, statement.value.elts, strict=False))
                for name, value in pairs:
                    if isinstance(name, ast.Name) and name.id in LINES:
                        try:
                            texts[name.id] = str(ast.literal_eval(value))
                        except ValueError:
                            continue
    return texts


def _registered() -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    from headloom.mechanism import mechanisms
    from headloom.mechanism.schedules import schedules

    return tuple(  # type: ignore[return-value]
        [{line: getattr(item, line) for line in LINES} for item in known.values()]
        for known in (mechanisms(), schedules())
    )
