"""The rules of the house, as tests: floors, sizes, names, what is imported when."""

from __future__ import annotations

import ast
import importlib.util
import re
import statistics
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import headloom
from headloom.mechanism import Attention, mechanisms, register

ROOT = Path(headloom.__file__).parent
REPOSITORY = ROOT.parent
FLOORS = {
    "core": 0,
    "records": 1,
    "ops": 2,
    "contract": 3,
    "mechanism": 4,
    "hf": 5,
    "costs": 6,
    "data": 6,
    "evaluate": 6,
    "train": 6,
    "bench": 7,
    "lab": 7,
    "report": 7,
    "cli": 8,
}
# train sets a run up from its data and scores it; lab measures steps: the only neighbours that may be used
NEIGHBOURS = {("train", "data"), ("train", "evaluate"), ("evaluate", "data"), ("lab", "report"), ("lab", "bench")}
FILES = sorted(ROOT.rglob("*.py"))


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def folder(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "headloom" and len(parts) > 1 and parts[1] in FLOORS else None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path):
    own = path.relative_to(ROOT).parts[0]
    if own not in FLOORS:
        return
    for name in imported(path):
        other = folder(name)
        if other is None or other == own or (own, other) in NEIGHBOURS:
            continue
        assert FLOORS[other] < FLOORS[own], f"{own} (floor {FLOORS[own]}) imports {name} (floor {FLOORS[other]})"


def modules() -> dict[str, Path]:
    """Dotted name -> file of every module and package."""
    return {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES
    }


def edges() -> dict[str, set[str]]:
    """Module -> the modules it imports, wherever in its file: at its top, in a function, or for type checkers only."""
    known = modules()
    found: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found[name] |= {alias.name for alias in node.names if alias.name in known}
            elif isinstance(node, ast.ImportFrom) and node.module in known:
                whole = {f"{node.module}.{alias.name}" for alias in node.names}
                found[name] |= {other if other in known else node.module for other in whole}
    return found


def test_no_import_circle_between_files():
    TopologicalSorter(edges()).prepare()  # raises CycleError, which names the files of a circle


def room(module: str) -> str:
    """lab and hf have rooms: folders inside the folder."""
    parts = module.split(".")
    depth = 3 if parts[1:2] in (["lab"], ["hf"]) else 2
    return ".".join(parts[:depth])


@pytest.mark.parametrize("within", [lambda module: ".".join(module.split(".")[:2]), room], ids=["folders", "rooms"])
def test_no_import_circle_between_folders(within):
    between: dict[str, set[str]] = {}
    for name, others in edges().items():
        if name != "headloom":  # the public names, of all floors
            mine = between.setdefault(within(name), set())
            mine |= {within(other) for other in others} - {within(name)}
    TopologicalSorter(between).prepare()


def test_every_folder_has_a_floor():
    folders = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    assert folders <= set(FLOORS)
    assert not folders & set(headloom.__all__), "a folder of a public name would hide it once it is imported"


@pytest.mark.parametrize("floor", ["ops", "contract", "mechanism"])
def test_lower_floors_need_torch_alone(floor: str):
    allowed = {"torch", "headloom", "__future__"} | set(sys.stdlib_module_names)
    for path in (ROOT / floor).rglob("*.py"):
        foreign = {name.split(".")[0] for name in imported(path)} - allowed
        assert not foreign, f"{path.name} imports {foreign}"


def test_records_need_no_torch_at_all():
    allowed = {"pydantic", "numpy", "headloom", "__future__"} | set(sys.stdlib_module_names)
    for path in (ROOT / "records").rglob("*.py"):
        names = imported(path)
        assert not (foreign := {name.split(".")[0] for name in names} - allowed), f"{path.name} imports {foreign}"
        assert {folder(name) for name in names} <= {None, "core", "records"}, path.name


def test_transformers_is_known_from_hf_up_only():
    """The models are hf's; data, train, evaluate and bench use its tokenizers and Trainer, lab hands them on."""
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        if own not in ("hf", "train", "data", "evaluate", "bench", "lab", "_hook.py"):
            assert not {n for n in imported(path) if n.split(".")[0] == "transformers"}, path


@pytest.mark.parametrize(
    "path", [*FILES, *sorted((REPOSITORY / "tests").rglob("*.py"))], ids=lambda p: str(p.relative_to(REPOSITORY))
)
def test_files_are_short(path: Path):
    assert len(path.read_text().splitlines()) <= 400


def test_most_files_are_neither_long_nor_crumbs():
    sizes = [len(path.read_text().splitlines()) for path in FILES if path.name != "__init__.py"]
    assert 100 <= statistics.median(sizes) <= 200


COMMAND = "a command, and the function that it calls"
# names of several classes or functions, and why they may share it
SHARED = {
    "attend": "softmax(Q K^T) V by one score path each",
    "weigh": "softmax(Q K^T) by one score path each",
    "markdown": "what the module makes, as Markdown",
    "main": "entry points of the command line",
    **dict.fromkeys(("compare", "cost", "decode", "finetune", "memory", "speed", "train"), COMMAND),
}


def test_a_name_has_one_meaning():
    """Of public classes and functions of modules: who searches for a name finds one thing."""
    places: dict[str, list[str]] = {}
    for path in FILES:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    several = {name: where for name, where in places.items() if len(where) > 1}
    assert not {name: where for name, where in several.items() if name not in SHARED}
    assert set(SHARED) <= set(several), "what is shared no more leaves the list"


def test_nothing_above_the_mechanisms_names_a_mechanism():
    """`if name == "iha"` above their floor would make a new mechanism touch more than its own file."""
    quoted = re.compile(rf"""["']({"|".join(mechanisms())})["']""")
    for path in FILES:
        own = path.relative_to(ROOT).parts[0]
        if FLOORS.get(own, 9) <= FLOORS["mechanism"] or own not in FLOORS:
            continue
        code = ast.parse(path.read_text())
        docs = {
            id(node.body[0].value)
            for node in ast.walk(code)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
            and node.body
            and isinstance(node.body[0], ast.Expr)
        }
        for node in ast.walk(code):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
                assert not quoted.fullmatch(repr(node.value)), f"{path.relative_to(ROOT)}:{node.lineno} {node.value}"


@pytest.mark.parametrize("name", list(mechanisms()))
def test_every_mechanism_has_a_citation_and_a_test(name: str):
    info = mechanisms()[name]
    module = sys.modules[info.cls.__module__]
    assert re.fullmatch(r"arXiv:\d{4}\.\d{4,5}", info.paper)
    assert info.paper in (module.__doc__ or ""), "the file opens with its paper"
    assert Path(module.__file__ or "").stem == name
    covered = [p for p in (REPOSITORY / "tests" / "mechanism").rglob("test_*.py") if f'"{name}"' in p.read_text()]
    assert covered, f"no test under tests/mechanism names {name}"


def test_registration_refuses_what_is_no_mechanism():
    with pytest.raises(TypeError, match="subclass"):
        register(int)  # type: ignore[arg-type]
    nameless = type("Nameless", (Attention,), {})
    with pytest.raises(TypeError, match="'name'"):
        register(nameless)
    double = type("Double", (Attention,), {"name": "mha", "title": "t", "paper": "p", "summary": "s"})
    with pytest.raises(TypeError, match="twice"):
        register(double)


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_light_and_reports_need_no_torch():
    code = "import sys, headloom{}; print(sorted({{'torch', 'transformers', 'pandas', 'altair'}} & set(sys.modules)))"
    assert run(code.format("")) == "[]"
    assert "torch" not in run(code.format(", headloom.report.page"))
    assert run(code.format(", headloom.mechanism")) == "['torch']"


def test_public_names_exist():
    for name in headloom.__all__:
        assert getattr(headloom, name) is not None
    assert headloom.attention("mha", hidden_size=4, num_heads=1).config.head_dim == 4
    with pytest.raises(AttributeError, match="no attribute 'attentoin'"):
        headloom.attentoin  # noqa: B018


def test_repository_speaks_of_itself_alone():
    """No machine paths in what is committed."""
    machine = re.compile(r"/(?:root|home|work)/\w")
    for path in [*FILES, *REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"), *REPOSITORY.glob("tests/**/*.py")]:
        if path.name != "test_house.py":
            assert not machine.search(path.read_text()), path


def test_every_public_function_of_the_laboratory_says_what_it_does():
    for path in (ROOT / "lab").rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                methods = node.body if isinstance(node, ast.ClassDef) else []
                for one in (node, *(part for part in methods if isinstance(part, ast.FunctionDef))):
                    where = f"{path.relative_to(ROOT)}: {one.name}"
                    assert one.name.startswith("_") or ast.get_docstring(one), f"{where} has no docstring"


def test_the_picture_of_the_floors_is_made_from_the_imports():
    spec = importlib.util.spec_from_file_location("architecture", REPOSITORY / "tools" / "architecture.py")
    assert spec is not None and spec.loader is not None
    architecture = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(architecture)
    assert architecture.PICTURE.read_text() == architecture.picture(), "run python tools/architecture.py"
