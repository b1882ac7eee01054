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
    # what can be said of paths, texts and values
    "compare --data nowhere": "'nowhere' does not exist",
    "compare --data model": "holds a model",
    "compare --data words.txt --text-column body": "is plain text",
    "compare --tokenizer byte": "Did you mean 'bytes'?",
    "compare --tokenizer bpe:3": "names no vocabulary",
    "compare --config nowhere": "'nowhere' holds no Hugging Face config",
    "compare --device gpu": "device",
    "compare --width 100 --heads 3": "do not divide the width 100",
    "compare --variants mha,iha:pseudo_heads=2,saz": "Did you mean 'sas'?",
    "compare --variants mha,iha:pseudo_heads=2 --set sas.kernel_size=1": "sets nothing",
    "compare --variants mha,iha:pseudo_heads=2 --data nowhere": "'nowhere' does not exist",
    "train nowhere.yaml": "'nowhere.yaml' does not exist",
    "train words.txt": "must hold a run's keys and values",
    "train typo.yaml": "unknown key 'stepz'. Did you mean 'steps'?",
    "train wrong.yaml": "steps='many'",
    "train mhaa.yaml": "unknown mechanism 'mhaa'. Did you mean 'mha'?",
    "train far.yaml": "'nowhere' does not exist",
    "train far.yaml --data words.txt --tokenizer byte": "Did you mean 'bytes'?",
    "train far.yaml --variant iha": "leave out either --variant",
    "train far.yaml --track trackioo": "unknown tracker 'trackioo'",
    "train --data nowhere": "'nowhere' does not exist",
    "train --variant iha:pseudo_heads=2 --data nowhere": "'nowhere' does not exist",
    "train --steps 0": "steps",
    "train --out file --data words.txt": "is a file",
    "study run nowhere.yaml": "neither a file nor a ready study",
    "study run words.txt": "must hold a study's keys and values",
    "study run typo.yaml": "unknown key",
    "study run study.yaml": "'nowhere' does not exist",
    "study run study.yaml --set data=words.txt --set seeds=0": "seeds must be a number of seeds",
    "study run study.yaml --set data=words.txt --set learning_rates=[0.1,0.1]": "holds one twice",
    "study run study.yaml --set data=words.txt --set tokenizer=byte": "Did you mean 'bytes'?",
    "study run variants.yaml": "unknown mechanism 'mhaa'. Did you mean 'mha'?",
    "cost iha:pseudo_heads=2,saz": "Did you mean 'sas'?",
    "cost iha --tokens 0": "tokens must be at least 1",
    "cost iha --dtype float31": "dtype must be float32",
    "cost iha --set pseudo_heads": "must look like name=value",
    "fold nowhere out": "'nowhere' does not exist",
    "fold model out": "only a grafted model can be folded",
    "fold graft full": "is not empty",
    "fold graft out --dtype float31": "unknown dtype 'float31'. Did you mean 'float32'?",
    "graft nowhere out --to iha": "'nowhere' does not exist",
    "graft empty out --to iha": "it holds no config.json",
    "graft model full --to iha": "is not empty",
    "graft model out --to iha:pseudo_heads=2 --dtype float31": "Did you mean 'float32'?",
    "graft model out --to iha:pseudo_heads=2 --layers 3-1": "runs backwards",
    "graft model out --to iha --set pseudo_heads": "must look like name=value",
    "generate nowhere --prompt x": "'nowhere' does not exist",
    "generate model --prompt x": "no tokenizer beside it",
    "generate model --prompt x --max-new-tokens 0": "max_new_tokens must be above 0",
    "generate model --prompt x --top-p 2": "top_p must be above 0 and at most 1",
    "generate model --prompt x --cache statik": "Did you mean 'static'?",
    "finetune nowhere --data words.txt --out out --to iha": "'nowhere' does not exist",
    "finetune model --data nowhere --out out --to iha:pseudo_heads=2": "'nowhere' does not exist",
    "finetune model --data words.txt --out out": "name the attention",
    "finetune model --data words.txt --out out --to iha --original model": "that is already a graft",
    "finetune graft --data words.txt --out out --to iha": "is already a graft",
    "finetune graft --data words.txt --out out": "give --original MODEL",
    "finetune graft --data words.txt --out out --original graft": "is a graft itself",
    "finetune model --data words.txt --out full --to iha:pseudo_heads=2": "is not empty",
    "finetune model --data words.txt --out out --to iha --steps 0": "steps",
    "finetune model --data words.txt --out out --to iha --seeds 0": "seeds must be at least 1",
    "finetune model --data words.txt --out out --to iha --dtype float16": "dtype",
    "finetune model --data words.txt --out out --to iha --layers x": "cannot be read at 'x'",
    "finetune model --data words.txt --out out --to iha --limit-bytes 0": "leaves no text",
    "finetune model --data words.txt --out out --to iha --validation-bytes 0": "validation_bytes must be at least 1",
    "bench speed --variants ihaa": "Did you mean 'iha'?",
    "bench speed --size tinny": "Did you mean 'tiny'?",
    "bench speed --modes forwrad": "Did you mean 'forward'?",
    "bench speed --part layerz": "Did you mean 'layer'?",
    "bench speed --part scores --against-plain": "no other form",
    "bench speed --part scores --modes step": "remove the others",
    "bench speed --against-hf": "add --modes step",
    "bench speed --against mine": "must look like package.module:Class",
    "bench speed --against mine.py:Mine": "there is no such file",
    "bench speed --device gpu": "device must be cpu or cuda",
    "bench speed --dtype float31": "dtype must be one of",
    "bench speed --repeats 0": "repeats must be at least 1",
    "bench speed --tokens 5x": "--tokens must be whole numbers",
    "bench speed --batch-size 0": "batch-size must be at least 1",
    "bench speed --markdown --json": "cannot go together",
    "bench speed --out file": "is a file",
    "bench memory --variants iha:pseudo_heads=2 --tokens 0": "tokens must be at least 1",
    "bench memory --set mha": "must look like name=value",
    "bench decode --contexts 0": "contexts must be at least 1",
    "bench decode --new-tokens 0": "new-tokens must be at least 1",
    "bench models --sizes 125": "Did you mean '125M'?",
    "bench models --modes forward": "unknown mode 'forward'",
    "bench models --modes train --compile": "compile goes with backward and step",
    "bench models --dtype float16": "float32 or bfloat16, not float16",
}
# torch is asked whether there is a GPU, and nothing is read before that
NO_GPU = {
    "compare --device cuda --data words.txt": "torch sees none",
    "study run study.yaml --set data=words.txt --set device=cuda": "torch sees none",
    "train far.yaml --data words.txt --set device=cuda": "torch sees none",
    "bench speed --device cuda": "torch sees none",
}

# Every call in a fork of one process, in which the heavy packages cannot be imported and the light ones are already.
# Where torch is asked, it is one that sees no GPU, and no text can be read.
TRY = """
import contextlib, io, json, os, sys
from headloom.cli.app import app

HEAVY = ("torch", "transformers", "scipy", "altair")

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in HEAVY:
            raise AssertionError(f"{name} is imported")

assert not set(HEAVY) & set(sys.modules)
sys.meta_path.insert(0, Refuse())
import headloom.bench.setting, headloom.hf.generation, headloom.lab.compare, headloom.report.bench, headloom.train.file
import headloom.data.corpus, headloom.lab.run.progress, rich.progress, typer.main, yaml
from headloom.lab.spec.names import described

described()
command = typer.main.get_command(app)

for call, asks_torch in json.loads(sys.argv[1]):
    if os.fork() == 0:
        if asks_torch:
            import types

            import headloom.data.corpus

            sys.modules["torch"] = types.ModuleType("torch")
            sys.modules["torch"].cuda = types.SimpleNamespace(is_available=lambda: False)
            headloom.data.corpus.load_corpus = None
        said = io.StringIO()
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            try:
                command(call.split())
            except SystemExit as end:
                status = end.code
            except BaseException as error:
                status = repr(error)
        os.write(1, (json.dumps([call, status, said.getvalue()]) + "\\n").encode())
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calls")
    (folder / "file").touch()
    (folder / "full").mkdir()
    (folder / "full" / "thesis.tex").touch()
    (folder / "empty").mkdir()
    (folder / "words.txt").write_text("the foxes jump over the dogs " * 400)
    (folder / "typo.yaml").write_text("stepz: 3\n")
    for name, model_type in (("model", "llama"), ("graft", "headloom")):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": model_type}))
    run = {"name": "r", "specs": ["mha"], "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 24}
    (folder / "far.yaml").write_text(json.dumps({**run, "steps": 2, "data": "nowhere"}))
    (folder / "wrong.yaml").write_text(json.dumps({**run, "steps": "many"}))
    (folder / "mhaa.yaml").write_text(json.dumps({**run, "steps": 2, "specs": ["mhaa"]}))
    variants = ["mha", {"use": "iha", "options": {"pseudo_heads": 2}}, "mhaa"]
    (folder / "variants.yaml").write_text(json.dumps({"variants": variants, "data": "words.txt"}))
    (folder / "study.yaml").write_text(json.dumps({"variants": ["mha", "gqa"], "data": "nowhere"}))
    calls = [(call, call in NO_GPU) for call in (*CALLS, *NO_GPU)]
    arguments = [sys.executable, "-c", TRY, json.dumps(calls)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=folder)
    return {call: answer for call, *answer in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize(("call", "part"), [*CALLS.items(), *NO_GPU.items()])
def test_a_wrong_call_is_answered_without_torch(answers, call, part):
    status, said = answers[call]
    assert status == 2 and part in said.splitlines()[-1], (status, said)
