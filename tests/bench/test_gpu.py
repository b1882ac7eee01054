"""The benchmark command on CUDA: events, bfloat16, the allocator's peak."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from headloom.cli.app import app

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
LAYER = ["--hidden-size", "256", "--heads", "4", "--device", "cuda", "--variants", "mha,iha,sas", "--json"]


def result(*arguments):
    done = CliRunner().invoke(app, ["bench", *arguments])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_speed():
    found = result("speed", *LAYER, "--tokens", "512", "--repeats", "3", "--modes", "forward,backward,step")
    assert found["dtype"] == "bfloat16" and "accelerator" in found["machine"]
    assert all(0 < row["utilisation_exact"] <= 1 for row in found["rows"])


def test_memory():
    found = result("memory", *LAYER, "--tokens", "512,1024")
    half, whole = (row["peak_bytes"] for row in found["rows"] if row["variant"] == "mha" and row["mode"] == "backward")
    assert 512 * 256 * 2 < half < whole


def test_decode():
    found = result("decode", *LAYER, "--contexts", "256", "--new-tokens", "4")
    assert found["rows"][0]["cache_bytes"] == 2 * 256 * 256 * 2
