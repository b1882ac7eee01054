"""Wrong calls are answered before torch is imported, which takes seconds. Counted by what is imported, not timed."""

import json
import subprocess
import sys

import pytest

CALLS = {
    "compare --variants mha": "at least two variants, not 1 ('mha')",
    "compare --variants mha,ihaa": "unknown mechanism 'ihaa'. Did you mean 'iha'?",
    "compare --variants mha,iha:pseudo_heads": "must look like name=value",
    "compare --size tinny": "unknown size 'tinny'. Did you mean 'tiny'?",
    "compare --steps 0": "steps",
    "compare --seeds 0": "seeds must be",
    "compare --learning-rate 0": "greater than 0",
    "compare --out file": "is a file",
    "compare --out full": "is not empty and holds no study",
    "study run equal_tim": "Did you mean 'equal_time'?",
    "study run equal_time --set stepz=3": "Did you mean 'steps'?",
    "study run equal_time --track trackioo": "unknown tracker 'trackioo'. Did you mean 'trackio'?",
    "study status nowhere": "holds no study",
    "train --variant ihaa": "Did you mean 'iha'?",
    "train --size tinny": "Did you mean 'tiny'?",
    "train --set steps": "must look like key=value",
    "cost ihaa": "Did you mean 'iha'?",
    "cost iha --size tinny": "Did you mean 'tiny'?",
    "graft model out --to ihaa": "Did you mean 'iha'?",
    "finetune model --data words.txt --out out --to ihaa": "Did you mean 'iha'?",
    "list --markdown --json": "cannot go together",
}

# every call in a fork of one process that has imported nothing but the commands
TRY = """
import contextlib, io, json, os, sys
from headloom.cli.app import app

assert "torch" not in sys.modules
for call in json.loads(sys.argv[1]):
    if os.fork() == 0:
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                app(call.split())
            except SystemExit as end:
                status = end.code
        heavy = [name for name in ("torch", "transformers", "scipy", "altair") if name in sys.modules]
        os.write(1, (json.dumps([call, status, said.getvalue(), heavy]) + "\\n").encode())
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    (folder / "file").touch()
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").touch()
    arguments = [sys.executable, "-c", TRY, json.dumps(list(CALLS))]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=folder)
    return {call: answer for call, *answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("call", "part"), CALLS.items())
def test_a_wrong_call_is_answered_without_torch(answers, call, part):
    status, said, heavy = answers[call]
    assert (status, heavy) == (2, []) and part in said.splitlines()[-1]
