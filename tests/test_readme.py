"""What the README shows is what its commands print (only measured differences and times may vary)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = (Path(__file__).parent.parent / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n+prints\n+```\n(.*?)```", README, re.DOTALL)
COSTS = re.findall(r"```\n\$ headloom (cost .*?)\n(.*?)```", README, re.DOTALL)


def settled(text: str) -> list[str]:
    """Lines without trailing space, rounding errors as a sign."""
    return [re.sub(r"\d\.\de[+-]\d\d", "#", line).rstrip() for line in text.strip().splitlines()]


@pytest.mark.parametrize(("code", "shown"), EXAMPLES)
def test_python_examples(code: str, shown: str, tmp_path: Path):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert settled(done.stdout) == settled(shown)


@pytest.mark.parametrize(("command", "shown"), COSTS)
def test_costs(command: str, shown: str):
    done = subprocess.run(
        [sys.executable, "-m", "headloom", *shlex.split(command)], capture_output=True, text=True, check=True
    )
    assert settled(done.stdout) == settled(shown)


def test_nothing_was_missed():
    assert len(EXAMPLES) == 2 and len(COSTS) == 1
