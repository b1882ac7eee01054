"""What the package needs: nothing that it does not use, and PyTorch alone for its attentions."""

from __future__ import annotations

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import yaml

import headloom

ROOT = Path(headloom.__file__).parent
REPOSITORY = ROOT.parent
PAPERS = ("iha", "sas")  # what this package is about
MODULES = {"pyyaml": "yaml", "vl-convert-python": "vl_convert"}  # distributions whose module has another name

ATTENTION_ALONE = """
import torch
import headloom as hl

for name in hl.mechanisms():
    attn = hl.attention(name, hidden_size=16, num_heads=2)
x_BTD = torch.randn(2, 5, 16)
attn, cache = hl.attention("iha", hidden_size=16, num_heads=2, pseudo_heads=2), hl.Cache()
whole = attn(x_BTD, mask=hl.Causal() & hl.Window(3))
parts = [attn(x_BTD[:, t : t + 1], mask=hl.Window(3), cache=cache) for t in range(5)]
torch.testing.assert_close(torch.cat(parts, 1), whole)
hl.attention(attn.config)
hl.maps(attn, x_BTD)
print(hl.cost("iha", hidden_size=16, num_heads=2, pseudo_heads=2, tokens=8).parameters)
"""


def test_every_requirement_is_used():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    used = set()
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                used.add(node.module.split(".")[0])
    for requirement in project["dependencies"]:
        name = re.split(r"[<>=\[ ]", requirement)[0]
        assert MODULES.get(name, name) in used, f"{name} is required and nowhere imported"


def needed_by(distribution: str, known: set[str]) -> set[str]:
    """The distribution and all that it needs, as far as it is installed here."""
    if distribution in known:
        return known
    known.add(distribution)
    for requirement in metadata.requires(distribution) or ():
        if "extra ==" not in requirement:
            name = re.split(r"[<>=!~;\[ (]", requirement)[0]
            if importlib.util.find_spec(MODULES.get(name, name.replace("-", "_"))) is not None:
                needed_by(name, known)
    return known


def test_attentions_need_torch_alone(tmp_path: Path):
    """In an environment that holds torch, what torch needs, and this package."""
    for name in needed_by("torch", set()):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 1] / top)
    (tmp_path / "headloom").symlink_to(ROOT)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{ATTENTION_ALONE}"
    said = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-2000:]
    assert int(said.stdout) == headloom.cost("iha", hidden_size=16, num_heads=2, pseudo_heads=2, tokens=8).parameters
    gone = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\nimport transformers"
    assert (
        "ModuleNotFoundError"
        in subprocess.run([sys.executable, "-I", "-S", "-c", gone], capture_output=True, text=True).stderr
    )


def test_it_says_whose_it_is_and_how_to_cite_it():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    assert project["authors"] == citation["authors"] and citation["version"] == headloom.__version__
    papers = {f"https://arxiv.org/abs/{headloom.mechanisms()[name].paper.removeprefix('arXiv:')}" for name in PAPERS}
    assert papers <= set(project["urls"].values()) and papers == {entry["url"] for entry in citation["references"]}
