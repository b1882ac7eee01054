"""One run over two processes on CPUs (gloo) equals the run in one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from headloom.core.errors import HeadloomError
from headloom.train.file import read_run, train_text
from headloom.train.records import read_metrics

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
validation_bytes: 2000
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "words.txt").write_text("\n".join(f"the {i} foxes jump over {i * i % 97} dogs" for i in range(900)))
    path = tmp_path / "run.yaml"
    path.write_text(RUN + f"data: {tmp_path / 'words.txt'}\n")
    return path


def test_two_processes_equal_one(file, tmp_path):
    run, text = read_run(file)
    one = train_text(run, text, tmp_path / "one")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    launch += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
    command = [*launch, "-m", "headloom.train", str(file), "--out", str(tmp_path / "two")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("bits per byte") == 1  # the first process speaks for both
    two = json.loads((tmp_path / "two" / "result.json").read_text())
    assert two["machine"]["processes"] == 2 and "processes" not in one.machine
    assert two["bits_per_byte"] == pytest.approx(one.bits_per_byte, rel=1e-6)
    for alone, shared in zip(read_metrics(tmp_path / "one"), read_metrics(tmp_path / "two"), strict=True):
        assert (alone["kind"], alone["step"], alone["tokens"]) == (shared["kind"], shared["step"], shared["tokens"])
        if alone["kind"] == "train":
            assert shared["loss"] == pytest.approx(alone["loss"], rel=1e-6)
            assert shared["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-5)


def test_a_batch_that_processes_cannot_share_is_refused(file, tmp_path, monkeypatch):
    run, text = read_run(file)
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(HeadloomError, match="3 processes cannot share the 4 rows of a forward pass evenly"):
        train_text(run, text, tmp_path / "r")


def test_sharding_that_would_not_happen_is_refused(file, tmp_path, monkeypatch):
    run, text = read_run(file)
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(HeadloomError, match="Accelerate shards over GPUs only"):
        train_text(run, text, tmp_path / "r")
