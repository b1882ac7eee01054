"""Runs followed by trackio and by wandb (offline): every step's metrics are read back from what they left on the disk.

Tensorboard: tests/cli/test_train.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headloom.core.errors import HeadloomError
from headloom.records.files import Record
from headloom.records.metrics import read_metrics
from headloom.train import tracking

RUN = """
name: shared
specs: [[iha, {pseudo_heads: 2}]]
hidden_size: 32
num_layers: 1
num_heads: 2
intermediate_size: 48
tokens: 16
batch_size: 8
steps: 6
evaluations: 1
learning_rate: 0.003
threads: 1
device: cpu
validation_bytes: 2000
"""
TRACKERS = [name for name in ("trackio", "wandb") if importlib.util.find_spec(name)]


def needs(name):
    absent = name not in TRACKERS
    assert not (absent and "CI" in os.environ), "CI has to install the extra 'track'"
    return pytest.mark.skipif(absent, reason=f"{name} is not installed: pip install 'headloom[track]'")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder of tracked.py's runs, and how its process ended."""
    folder = tmp_path_factory.mktemp("tracked")
    (folder / "words.txt").write_text("\n".join(f"the {i} foxes jump over {i * i % 97} dogs" for i in range(900)))
    (folder / "run.yaml").write_text(RUN + f"data: {folder / 'words.txt'}\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TRACKIO", "WANDB"))}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("tracked.py"), folder / "run.yaml", folder, *TRACKERS],
        env={**clean, "HOME": str(folder / "home"), "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, done


def expected(folder):
    """The records of the steps, by the names that the Trainer gives them."""
    names = ("loss", "grad_norm", "learning_rate")
    return [
        {"train/global_step": record["step"], **{f"train/{name}": record[name] for name in names}}
        for record in map(Record.to_dict, read_metrics(folder))
        if record["kind"] == "train"
    ]


def validations(folder, kind="eval"):
    """The same of its validations: of the one at the end, or of those along the way ("curve")."""
    prefix = "eval/" if kind == "eval" else "eval/curve_"
    return [
        {f"{prefix}bits_per_byte": record["bits_per_byte"], f"{prefix}loss": record["validation_loss"]}
        for record in map(Record.to_dict, read_metrics(folder))
        if record["kind"] == kind
    ]


def told(rows):
    """Of rows, what `expected` and `validations` say too."""
    keys = ("train/global_step", "train/loss", "train/grad_norm", "train/learning_rate")
    steps = [{key: row[key] for key in keys} for row in rows if "train/loss" in row]
    measured = [
        [{key: row[key] for key in keys} for row in rows if keys[1] in row]
        for keys in (("eval/bits_per_byte", "eval/loss"), ("eval/curve_bits_per_byte", "eval/curve_loss"))
    ]
    return steps, *measured


@needs("trackio")
def test_trackio_has_every_step(made):
    folder, _ = made
    first = folder / "trackio" / "first"
    with sqlite3.connect(first / "tracking" / "headloom.db") as database:
        rows = database.execute("select run_name, metrics from metrics order by id").fetchall()
        ((config,),) = database.execute("select config from configs").fetchall()
    assert {name for name, _ in rows} == {"shared"}
    wanted = (expected(first), validations(first), validations(first, "curve"))
    assert told([json.loads(metrics) for _, metrics in rows]) == wanted
    assert [len(records) for records in wanted] == [6, 1, 2]
    assert json.loads(config)["hidden_size"] == 32


@needs("wandb")
def test_wandb_has_every_step_of_every_run(made):
    folder, _ = made
    first, failing = folder / "wandb" / "first", folder / "wandb" / "failing"
    runs = {place: list(records(*(place / "tracking").rglob("*.wandb"))) for place in (first, failing)}
    for place, status in ((first, 0), (failing, 1)):
        kinds = [kind for kind, _ in runs[place]]
        assert kinds.count("run") == 1 and kinds.count("exit") == 1
        by_kind = dict(runs[place])
        assert (by_kind["run"].project, by_kind["run"].display_name) == ("headloom", "shared")
        assert by_kind["exit"].exit_code == status
    rows = [
        {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in history.item}
        for kind, history in runs[first]
        if kind == "history"
    ]
    assert told(rows) == (expected(first), validations(first), validations(first, "curve"))


def records(path):
    """(kind, message) of an offline run's file: a log in LevelDB's format, of blocks of 32 KiB, after 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, whole = path.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while place + 7 <= len(content):
        if (left := 32768 - place % 32768) < 7:
            place += left
        _, length, part = struct.unpack_from("<IHB", content, place)
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if part in (1, 4):  # all of it, or its end
            record = Record.FromString(whole)
            kind = record.WhichOneof("record_type")
            yield kind, getattr(record, kind)
            whole = b""


@pytest.mark.skipif(not TRACKERS, reason="neither trackio nor wandb is installed: pip install 'headloom[track]'")
def test_nothing_is_left_elsewhere_and_nothing_disturbs_the_json(made):
    folder, done = made
    decoder, rest, results = json.JSONDecoder(), done.stdout, []
    while rest.strip():
        result, end = decoder.raw_decode(rest)
        results.append(result)
        rest = rest[end:].lstrip()
    assert [Path(result["folder"]) for result in results] == [folder / name / "first" for name in TRACKERS]
    assert len({result["weights"] for result in results}) == 1
    assert not [path for path in (folder / "home").rglob("*") if path.is_file()]


@needs("trackio")
def test_trackio_cannot_change_its_folder_in_one_process(made, tmp_path, monkeypatch):
    folder, done = made
    assert "trackio: trackio chose its folder when it was imported" in done.stderr
    assert not (folder / "trackio" / "failing").exists()
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(TRACKIO_DIR=tmp_path / "one", __spec__=""))
    with pytest.raises(HeadloomError, match="in a process of its own, or set TRACKIO_DIR before the first one"):
        tracking.check("trackio", tmp_path / "r")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "one"))
    tracking.check("trackio", tmp_path / "r")  # the caller's word
