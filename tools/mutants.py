"""Measure what the tests notice: `python tools/mutants.py --count 200 --seed 0` breaks one place of the code at a time.

A mutant is the package with one small fault: another comparison, sign, number or truth value, a condition the other way
round, two arguments swapped, a statement left out. It is killed if a test that belongs to its file fails, and survives
if all pass: then a test is missing, or the fault changes nothing that can be seen. Each mutant's tests run in a process
forked from one that has imported PyTorch already. Results are JSON lines; what a file of them holds is not run again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib.abc
import importlib.util
import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDERS = ("ops", "contract", "mechanism")
SKIPPED = {"ops/gpu.py": "its tests need a GPU"}
COMPARE = {"Lt": "LtE", "LtE": "Lt", "Gt": "GtE", "GtE": "Gt", "Eq": "NotEq", "NotEq": "Eq", "Is": "IsNot"}
COMPARE |= {"IsNot": "Is", "In": "NotIn", "NotIn": "In"}
ARITHMETIC = {"Add": "Sub", "Sub": "Add", "Mult": "Div", "Div": "Mult", "FloorDiv": "Mult", "Mod": "FloorDiv"}
ARITHMETIC |= {"Pow": "Mult", "BitAnd": "BitOr", "BitOr": "BitAnd"}
NAMES = {"max": "min", "min": "max", "any": "all", "all": "any", "amax": "amin", "amin": "amax", "cos": "sin"}
KILLED, SURVIVED, TIMEOUT = "killed", "survived", "timeout"


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, messages and texts, which decide nothing."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from expressions(child)


def faults(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """(what changes, the node that takes its place)."""

    def changed(**fields: Any) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        other = COMPARE[type(node.ops[0]).__name__]
        yield f"{type(node.ops[0]).__name__} -> {other}", changed(ops=[getattr(ast, other)()])
    elif isinstance(node, ast.BinOp) and type(node.op).__name__ in ARITHMETIC:
        other = ARITHMETIC[type(node.op).__name__]
        yield f"{type(node.op).__name__} -> {other}", changed(op=getattr(ast, other)())
    elif isinstance(node, ast.BoolOp):
        other = "Or" if isinstance(node.op, ast.And) else "And"
        yield f"{type(node.op).__name__} -> {other}", changed(op=getattr(ast, other)())
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub | ast.Invert):
        yield f"{type(node.op).__name__} left out", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield f"{node.value} -> {not node.value}", changed(value=not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        for step in (1, -1):
            yield f"{node.value} -> {node.value + step}", changed(value=node.value + step)
    elif isinstance(node, ast.If | ast.IfExp):
        yield "condition the other way round", changed(test=ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Raise | ast.AugAssign):
        yield "statement left out", ast.Pass()
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "call left out", ast.Pass()
    elif isinstance(node, ast.Call) and len(node.args) > 1 and not any(isinstance(a, ast.Starred) for a in node.args):
        yield "first two arguments swapped", changed(args=[node.args[1], node.args[0], *node.args[2:]])
    if isinstance(node, ast.Attribute) and node.attr in NAMES:
        yield f"{node.attr} -> {NAMES[node.attr]}", changed(attr=NAMES[node.attr])
    elif isinstance(node, ast.Name) and node.id in NAMES:
        yield f"{node.id} -> {NAMES[node.id]}", changed(id=NAMES[node.id])


class Place(ast.NodeTransformer):
    """Puts one node in the place of another."""

    def __init__(self, old: ast.AST, new: ast.AST):
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else super().visit(node)


def mutants(package: Path) -> Iterator[dict[str, Any]]:
    """Every single fault of the package: an id, where it is, and the number of the fault in its file."""
    for path in sorted(path for folder in FOLDERS for path in (package / folder).glob("*.py")):
        name = str(path.relative_to(package))
        if name in SKIPPED:
            continue
        lines, number = path.read_text().splitlines(), 0
        for node in expressions(ast.parse(path.read_text())):
            for what, _ in faults(node):
                line, column = node.lineno, node.col_offset  # type: ignore[attr-defined]
                text = lines[line - 1].strip()
                yield {"id": f"{name}:{line}:{column} {what} #{number}", "file": name, "number": number, "code": text}
                number += 1


def source(path: Path, number: int) -> str:
    """The file's text with its fault of that number (-1: none, to see that its tests pass)."""
    tree = ast.parse(path.read_text())
    if number < 0:
        return path.read_text()
    found = [(node, new) for node in expressions(tree) for _, new in faults(node)]
    return ast.unparse(ast.fix_missing_locations(Place(*found[number]).visit(tree)))


def imported(path: Path) -> set[str]:
    """The modules that a file imports, and the names it takes from them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def users(root: Path, name: str) -> set[str]:
    """The mechanisms that a file serves; none: it serves all."""
    folder, stem = name.removesuffix(".py").split("/")
    if folder == "mechanism":
        return {stem} if (root / "tests" / "mechanism" / f"test_{stem}.py").exists() else set()
    files = (path for path in (root / "headloom").rglob("*.py") if f"headloom.{folder}.{stem}" in imported(path))
    found = {path.relative_to(root / "headloom") for path in files}
    return {path.stem for path in found} if {path.parts[0] for path in found} == {"mechanism"} else set()


def tests_of(root: Path, name: str) -> list[str]:
    """The tests of a file: its namesake first, then those of what is built on it."""
    folder, stem = name.removesuffix(".py").split("/")
    tests, serves = root / "tests", users(root, name)
    own = sorted(path for path in tests.rglob(f"test_{stem}*.py") if path.parts[-2] == folder)
    properties = tests / "contract" / "conformance"
    if serves:
        rest = [*(tests / "mechanism" / f"test_{user}.py" for user in sorted(serves)), properties]
    else:
        beside = sorted((tests / "ops").glob("test_*.py")) if folder == "ops" else []
        mechanisms = [tests / "mechanism" / f"test_{user}.py" for user in ("gqa", "iha", "sas")]
        if folder == "mechanism":
            mechanisms = [tests / "test_toy_mechanism.py", tests / "mechanism"]
        rest = [*beside, *mechanisms, *sorted((tests / "contract").glob("test_*.py")), properties]
    return [str(path.relative_to(root)) for path in dict.fromkeys((*own, *rest)) if path.exists()]


class Only:
    """Of tests that run for every mechanism, those of some: their ids begin with its name.

    No test that measures memory: its process here holds all that was imported before."""

    def __init__(self, served: set[str]):
        self.served, self.failed = served, ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        from headloom.mechanism import mechanisms

        others = set(mechanisms()) - self.served if self.served else set()
        items[:] = [
            item
            for item in items
            if re.split(r"[-\]]", item.name.partition("[")[2])[0] not in others and "memory" not in item.nodeid
        ]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


class Mutated(importlib.abc.MetaPathFinder, importlib.abc.SourceLoader):
    """Imports one module from another text."""

    def __init__(self, module: str, path: Path, text: str):
        self.module, self.path, self.text = module, path, text

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.module else None

    def get_filename(self, fullname: str) -> str:
        return str(self.path)

    def get_data(self, path: str | bytes) -> bytes:
        return self.text.encode()


def child(root: Path, mutant: dict[str, Any], seconds: int, out: int) -> None:
    """In the forked process: run the tests and write which one failed."""
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    folder, stem = mutant["file"].removesuffix(".py").split("/")
    path = root / "headloom" / mutant["file"]
    sys.meta_path.insert(0, Mutated(f"headloom.{folder}.{stem}", path, source(path, mutant["number"])))
    only = Only(users(root, mutant["file"]))
    quiet = [
        "-x",
        "-q",
        "--tb=no",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-W",
        "ignore::pytest.PytestAssertRewriteWarning",
    ]
    code = pytest.main([*quiet, *tests_of(root, mutant["file"])], plugins=[only])
    result = {0: SURVIVED, 1: KILLED, 2: KILLED, 3: KILLED, 4: KILLED}.get(int(code), "no tests")
    os.write(out, json.dumps({"result": result, "by": only.failed or ("import" if code != 0 else "")}).encode())


def run(root: Path, mutant: dict[str, Any], seconds: int) -> dict[str, Any]:
    """Fork, wait, and say what became of the mutant; whatever it started is ended with it."""
    read, write = os.pipe()
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        try:
            child(root, mutant, seconds, write)
        except BaseException as error:
            os.write(write, json.dumps({"result": "error", "by": f"{type(error).__name__}: {error}"[:200]}).encode())
        finally:
            os._exit(0)
    os.close(write)
    ended, usage = 0, None
    while not ended and time.monotonic() - start < 10 * seconds:
        ended, _, usage = os.wait4(pid, os.WNOHANG)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not ended:
        _, _, usage = os.wait4(pid, 0)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read()
    found = json.loads(text) if text else {"result": TIMEOUT, "by": ""}
    assert usage is not None
    return {**mutant, **found, "cpu": round(usage.ru_utime + usage.ru_stime, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=200, help="how many mutants to draw")
    parser.add_argument("--seed", type=int, default=0, help="which: a larger count of a seed begins with the smaller's")
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help="the repository")
    parser.add_argument("--only", default="", help="only files whose path holds this text")
    parser.add_argument("--whole", action="store_true", help="run every file's tests without a fault instead")
    parser.add_argument("--seconds", type=int, default=600, help="processor time after which a mutant's tests end")
    parser.add_argument("--out", type=Path, default=Path("mutants.jsonl"), help="results, one JSON object a line")
    options = parser.parse_args()
    root, out = options.root.resolve(), options.out.resolve()
    every = [mutant for mutant in mutants(root / "headloom") if options.only in mutant["file"]]
    random.Random(options.seed).shuffle(every)
    files = dict.fromkeys(mutant["file"] for mutant in every)
    whole = [{"id": f"{name} as it is", "file": name, "number": -1, "code": ""} for name in sorted(files)]
    drawn = whole if options.whole else every[: options.count]
    known = {
        entry["id"]: entry
        for line in (out.read_text().splitlines() if out.exists() else ())
        if (entry := json.loads(line))
    }
    os.chdir(root)
    sys.path.insert(0, str(root))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import pytest  # noqa: F401
    import torch._dynamo
    import transformers.models.llama.modeling_llama  # noqa: F401

    torch.set_num_threads(1)  # threads do not survive a fork
    gc.freeze()
    for i, mutant in enumerate(drawn):
        if mutant["id"] not in known:
            known[mutant["id"]] = found = run(root, mutant, options.seconds)
            with out.open("a") as file:
                file.write(json.dumps(found) + "\n")
        found = known[mutant["id"]]
        print(f"{i + 1}/{len(drawn)} {found['result']} {found['id']} {found['by']}", flush=True)
    results = Counter(known[mutant["id"]]["result"] for mutant in drawn)
    print(f"{len(every)} mutants, {len(drawn)} drawn: " + ", ".join(f"{n} {name}" for name, n in results.items()))


if __name__ == "__main__":
    main()
