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


def test_the_table_of_questions_names_commands_and_options_that_there_are():
    import typer

    from headloom.cli.app import app

    root = typer.main.get_command(app)
    table = README.partition("## Which command answers which question")[2].partition("\n## ")[0]
    calls = [shlex.split(call) for call in re.findall(r"`headloom (.*?)`", table)]
    assert len(calls) >= 8
    for call in calls:
        command, words = root, list(call)
        while hasattr(command, "commands"):
            assert words[0] in command.commands, call
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, call


def test_the_demo_answers_its_question():
    """Some difference at equal parameters is outside the noise between seeds, at the default's own rate and steps."""
    shown = README.partition("make demo")[2].partition("Read it as it stands")[0]
    assert re.search(
        r"is (better|worse) than mha by [0-9.]+ ± [0-9.]+ bits per byte over \d+ seeds at equal param", shown
    )
