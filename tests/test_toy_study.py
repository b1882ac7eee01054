"""A study is two files: a mechanism of one's own and a YAML file. The package is not touched."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import yaml
from typer.testing import CliRunner

import headloom as hl
from headloom.cli.app import app
from headloom.mechanism.registry import _MECHANISMS

MECHANISM = '''
"""Attention whose values have a gain each. arXiv:0000.00000."""

import dataclasses

import torch

from headloom.contract.attention import Attention
from headloom.contract.config import AttentionConfig
from headloom.ops.mixing import Mix


@dataclasses.dataclass(frozen=True, kw_only=True)
class GainConfig(AttentionConfig):
    """As `AttentionConfig`; start: every gain at the start."""

    start: float = 1.0


class Gain(Attention):
    name = "gain"
    title = "Attention with gains"
    paper = "arXiv:0000.00000"
    summary = "queries times a number for each head"
    config_cls = GainConfig

    def build_heads(self):
        self.gain = Mix(self.config.num_heads)

    @torch.no_grad()
    def reset_heads(self):
        self.gain.weight.fill_(self.config.start)

    def queries(self, q_BHTK, positions_BT, length):
        return super().queries(q_BHTK * self.gain.weight[:, None, None].to(q_BHTK.dtype), positions_BT, length)
'''

STUDY = """
title: Gains in every other layer
options: {mha: {rope_scaling: {rope_type: linear, factor: 2}}}
variants:
  - mha
  - use: gain
    options: {rope_scaling: {rope_type: linear, factor: 2}}
    sweep: {start: [0.5, 1e-1]}
  - use: pattern
    label: every other
    options:
      layers:
        - [gain, {start: 2, rope_scaling: {rope_type: linear, factor: 2}}]
        - [mha, {rope_scaling: {rope_type: linear, factor: 2}}]
backbone: {layers: 3, width: 16, heads: 2}
budgets: [{match: parameters, knob: F, tolerance: 0.02}]
tokens: 16
batch_size: 2
steps: 2
seeds: 2
evaluations: 1
threads: 1
engine: {workers: 1}
"""
LINEAR = {"rope_type": "linear", "factor": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The two files and a text, the mechanism registered for the time of these tests."""
    folder = tmp_path_factory.mktemp("mine")
    (folder / "gain.py").write_text(MECHANISM)
    (folder / "text.txt").write_text("\n".join(f"the {i} brown foxes jump over {i * i % 97} dogs" for i in range(900)))
    (folder / "gains.yaml").write_text(STUDY + f"data: {folder / 'text.txt'}\n")
    found = importlib.util.spec_from_file_location("gain", folder / "gain.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    before, sys.modules["gain"] = dict(_MECHANISMS._items), module
    try:
        hl.register(module.Gain)
        yield folder
    finally:
        del sys.modules["gain"]
        _MECHANISMS._items.clear()
        _MECHANISMS._items.update(before)


@pytest.fixture(scope="module")
def made(folder):
    done = CliRunner().invoke(app, ["study", "run", str(folder / "gains.yaml"), "--out", str(folder / "study")])
    assert done.exit_code == 0, done.output
    return folder / "study"


def test_every_variant_is_run_with_every_seed_in_processes_that_know_the_mechanism(made):
    results = json.loads((made / "results.json").read_text())
    found = {variant["label"]: variant for variant in results["variants"]}
    scaled = "gain:rope_scaling={rope_type: linear, factor: 2}"
    assert list(found) == ["mha", f"{scaled}:start=0.5", f"{scaled}:start=0.1", "every other"]
    assert [run["status"] for run in results["runs"]] == ["finished"] * 8
    assert all(abs(variant["parameters_relative"]) <= 0.02 for variant in found.values())


def test_what_stands_in_the_file_reaches_the_runs_with_its_types(made):
    specs = {
        path.parent.name: json.loads(path.read_text())["specs"] for path in (made / "runs").glob("*-seed0/config.json")
    }
    pattern = next(found for name, found in specs.items() if name.startswith("every"))
    assert pattern == [
        {"mechanism": "gain", "options": {"start": 2, "rope_scaling": LINEAR}},
        {"mechanism": "mha", "options": {"rope_scaling": LINEAR}},
        {"mechanism": "gain", "options": {"start": 2, "rope_scaling": LINEAR}},
    ]
    swept = sorted(
        (layer["options"] for found in specs.values() for layer in found if found != pattern),
        key=lambda options: options.get("start", 0.0),
    )
    assert swept == [
        {"rope_scaling": LINEAR},
        {"rope_scaling": LINEAR, "start": 0.1},
        {"rope_scaling": LINEAR, "start": 0.5},
    ]


def test_the_folder_s_own_file_makes_the_same_study(folder, made):
    written = yaml.safe_load((made / "study.yaml").read_text())
    assert written["variants"][2]["options"]["layers"][0] == ["gain", {"start": 2, "rope_scaling": LINEAR}]
    again = CliRunner().invoke(app, ["study", "run", str(made / "study.yaml"), "--out", str(made)])
    assert again.exit_code == 0 and "8 of 8 runs are finished already" in again.stderr, again.output
    status = CliRunner().invoke(app, ["study", "status", str(made), "--json"])
    assert json.loads(status.stdout)["runs"] == {"finished": 8, "failed": 0, "waiting": 0}
