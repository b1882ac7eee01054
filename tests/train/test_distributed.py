"""One run over two processes on CPUs (gloo), by replicas (DDP) or sharded (FSDP2), equals the run in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headloom  # noqa: F401  (registers our models)
from headloom.core.errors import HeadloomError
from headloom.records.metrics import read_metrics
from headloom.train import sharding
from headloom.train.file import read_run, train_text

SCRIPT = Path(__file__).with_name("sharded.py")
RUN = """
name: shared
specs: [[iha, {pseudo_heads: 2}]]
hidden_size: 32
num_layers: 2
num_heads: 2
intermediate_size: 48
tokens: 16
batch_size: 8
accumulation_steps: 2
steps: 6
learning_rate: 0.003
warmup_steps: 2
threads: 1
device: cpu
evaluations: 2
validation_bytes: 2000
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(f"the {i} foxes jump over {i * i % 97} dogs" for i in range(900)))
    path = tmp_path / "run.yaml"
    path.write_text(RUN + f"data: {tmp_path / 'words.txt'}\n")
    return path


@pytest.fixture
def one(file, tmp_path):
    """The run in one process: its folder."""
    run, text = read_run(file)
    train_text(run, text, tmp_path / "one", save_model=True)
    return tmp_path / "one"


def launch(*command: object) -> str:
    """What two processes print, which must end well."""
    start = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    start += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    done = subprocess.run([*start, *map(str, command)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def assert_same(alone, shared):
    """Two run folders have the same numbers, but for the order of additions."""
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (alone, shared))
    assert second["machine"]["processes"] == 2 and "processes" not in first["machine"]
    for key in ("parameters", "no_decay_parameters", "tokens", "validation_tokens"):
        assert second[key] == first[key]
    assert second["bits_per_byte"] == pytest.approx(first["bits_per_byte"], rel=1e-6)
    for a, b in zip(read_metrics(alone), read_metrics(shared), strict=True):
        assert (a.kind, a.step, a.tokens) == (b.kind, b.step, b.tokens)
        if a.kind == "train":
            assert b.loss == pytest.approx(a.loss, rel=1e-6)
            assert b.grad_norm == pytest.approx(a.grad_norm, rel=1e-5)
        else:
            assert b.bits_per_byte == pytest.approx(a.bits_per_byte, rel=1e-6)
    weights, others = (load_file(folder / "model" / "model.safetensors") for folder in (alone, shared))
    assert {name: w.shape for name, w in others.items()} == {name: w.shape for name, w in weights.items()}
    for name, weight in weights.items():
        torch.testing.assert_close(others[name], weight, rtol=1e-5, atol=1e-5, msg=name)
    model = AutoModelForCausalLM.from_pretrained(shared / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_two_processes_equal_one(file, one, tmp_path):
    said = launch("--multi_gpu", "-m", "headloom.train", file, "--out", tmp_path / "two", "--save-model")
    assert said.count("bits per byte") == 1  # the first process speaks for both
    machine = json.loads((tmp_path / "two" / "result.json").read_text())["machine"]
    assert machine.get("freed_memory") != "returned", "its processes kept freed memory"
    assert_same(one, tmp_path / "two")


def test_two_processes_that_share_the_weights_equal_one(file, one, tmp_path):
    launch(
        "--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP", SCRIPT, file, tmp_path
    )
    assert_same(one, tmp_path / "whole")
    whole, broken = (json.loads((tmp_path / name / "result.json").read_text()) for name in ("whole", "broken"))
    assert whole["machine"]["sharding"] == "FSDP"
    assert broken["weights"] == whole["weights"]  # 6 = 3 + 3 steps, bit for bit
    first, second = (json.loads((tmp_path / f"shards-{rank}.json").read_text()) for rank in (0, 1))
    weights = load_file(one / "model" / "model.safetensors")
    assert first.keys() == second.keys() == weights.keys()
    for name, weight in weights.items():
        rows, *rest = weight.shape
        half = -(-rows // 2)  # of the rows, with the rows' moments
        assert first[name] == [[rows, *rest], *([[half, *rest]] * 3)]
        assert second[name] == [[rows, *rest], *([[rows - half, *rest]] * 3)]


def test_a_batch_that_processes_cannot_share_is_refused(file, tmp_path, monkeypatch):
    run, text = read_run(file)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(HeadloomError, match="3 processes cannot share the 4 rows of a forward pass evenly"):
        train_text(run, text, tmp_path / "r")


@pytest.mark.parametrize(
    ("kind", "version", "accelerator", "message"),
    [
        (DistributedType.NO, "2", False, "a single process: give accelerate launch --num_processes 2"),
        (DistributedType.MULTI_CPU, "1", False, "version 2 only: give accelerate launch --fsdp_version 2"),
        (DistributedType.MULTI_CPU, "2", True, "on CPUs of a machine with an accelerator"),
    ],
)
def test_sharding_that_would_not_happen_is_refused(kind, version, accelerator, message, monkeypatch):
    state = SimpleNamespace(distributed_type=kind, device=torch.device("cpu"))
    monkeypatch.setattr(sharding, "PartialState", lambda: state)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    sharding.allow_cpus()  # nothing was asked for
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv("FSDP_VERSION", version)
    with pytest.raises(HeadloomError, match=message):
        sharding.allow_cpus()
    assert state.distributed_type is kind


def test_a_checkpoint_is_gone_on_with_as_it_was_written(file, tmp_path, monkeypatch):
    run, text = read_run(file)

    def stop(step, steps, loss):
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train_text(run, text, tmp_path / "r", stop, checkpoint_seconds=0)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(HeadloomError, match="holds a checkpoint without FSDP: go on as the run was launched before"):
        train_text(run, text, tmp_path / "r")
