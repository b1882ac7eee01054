"""The Ray engine on a cluster of this machine: two workers, one of which is killed."""

import json
import math
import os
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.run.engines import Listener
from headloom.lab.run.engines import cluster as engines
from headloom.lab.run.progress import Progress
from headloom.lab.run.work import Bundle, Failed, Foreign, Job
from headloom.lab.spec.study import EngineOptions
from headloom.lab.study import Study

pytestmark = pytest.mark.ray

try:
    import ray
except ImportError:
    assert "CI" not in os.environ, "CI has to install the extra 'ray'"
    pytest.skip("ray is not installed: pip install 'headloom[ray]'", allow_module_level=True)

VALUES = {
    "variants": ["mha", "iha:pseudo_heads=2"],
    "backbone": {"layers": 1, "width": 16, "heads": 2},
    "tokens": 16,
    "batch_size": 2,
    "steps": 150,
    "threads": 1,
    "seeds": 2,
    "validation_bytes": 2000,
}


@pytest.fixture(scope="module")
def cluster():
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    yield
    ray.shutdown()


def kill_one(killed):
    """SIGKILL the first process that works on a run."""
    deadline = time.monotonic() + 900
    while not killed and time.monotonic() < deadline:
        for process in psutil.process_iter():
            try:
                if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::headloom run"):
                    time.sleep(0.2)
                    os.kill(process.pid, signal.SIGKILL)
                    killed.append(process.pid)
                    break
            except (psutil.Error, ProcessLookupError):
                continue
        time.sleep(0.02)


class Told(Progress):
    def __init__(self):
        self.begun, self.steps, self.ended = Counter(), {}, {}

    def run(self, name, number):
        self.begun[number] += 1

    def step(self, number, step, loss):
        assert number not in self.ended and math.isfinite(loss)
        self.steps.setdefault(number, []).append(step)

    def ran(self, number, summary):
        assert self.begun[number]
        self.ended[number] = summary


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
def test_a_killed_worker_costs_a_retry_and_the_numbers_are_the_same(cluster, text_file, tmp_path):
    study = {**VALUES, "data": str(text_file)}
    here = Study(**study, engine={"name": "inline"}).run(tmp_path / "here", report=False)
    killed = []
    killer = threading.Thread(target=kill_one, args=(killed,), daemon=True)
    killer.start()
    told = Told()
    engine = {"name": "ray", "retries": 3, "track": "tensorboard"}
    there = Study(**study, engine=engine).run(tmp_path / "there", report=False, progress=told)
    killer.join()
    assert len(killed) == 1
    assert there.results["status"] == "complete"

    def numbers(found):
        return {run["folder"]: (run["bits_per_byte"], run["weights"]) for run in found.results["runs"]}

    assert numbers(there) == numbers(here)
    lines = (tmp_path / "there" / "runs" / "iha-seed1" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "train" for line in lines) == 150
    assert (tmp_path / "there" / "runs" / "iha-seed1" / "mixes.npz").is_file()
    result = json.loads((tmp_path / "there" / "runs" / "iha-seed1" / "result.json").read_text())
    assert result["machine"].get("freed_memory") != "returned", "its process kept freed memory"

    assert list((tmp_path / "there" / "runs" / "iha-seed1" / "tracking").iterdir())
    assert [told.steps[number][-1] for number in (1, 2, 3, 4)] == [150] * 4
    assert told.ended.keys() == told.begun.keys() == {1, 2, 3, 4}

    slow = {**study, "steps": 5000}
    late = Study(**slow, engine={"name": "ray", "timeout": 0.5}).run(tmp_path / "late", report=False)
    assert [run["reason"].split(" after")[0] for run in late.failed] == ["timed out"] * 4


def test_a_run_that_hangs_is_seen_and_killed(cluster, tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(engines, "GRACE_SECONDS", 0.3)
    bundle = Bundle(None, None, None, (Foreign("hangs_at_once", "None", str(tmp_path / "hangs.py")),))
    run = Job("stuck", "train", str(tmp_path / "r"), {"run": {"device": "cpu"}})
    with (
        engines.RayEngine(bundle, EngineOptions(name="ray", timeout=0.5), threads=1) as engine,
        pytest.raises(Failed, match=r"stuck: timed out after \d+ s \(engine.timeout\)"),
    ):
        engine.one(run)


def test_steps_are_told_while_a_run_goes_on_and_heard_once(tmp_path, monkeypatch):
    said, heard = [], []
    board = SimpleNamespace(tell=SimpleNamespace(remote=lambda name, words: said.append((name, *words))))

    def work(job, bundle, on_step):
        for step in (1, 2, 3):
            on_step(step, 5.0 - step)
        Path(job.folder, "tracking").mkdir(parents=True)
        Path(job.folder, "tracking", "events").write_bytes(b"e")
        Path(job.folder, "checkpoints").mkdir()
        Path(job.folder, "checkpoints", "weights").write_bytes(b"w")
        return {"bits_per_byte": 2.0}

    monkeypatch.setattr(engines, "work", work)
    job = Job("a run", "train", str(tmp_path / "r"), {})
    result, reason, left, last = engines.train_on_worker(job, None, board, None)
    assert (result, reason, left) == ({"bits_per_byte": 2.0}, None, {"tracking/events": b"e"})
    attempt = last[0]
    assert [words[2] for words in said] == [0, 1] and last == (attempt, 3, 2.0)  # not every step, but the first at once
    monkeypatch.setattr(engines, "LOOK_SECONDS", -1.0)
    engines.train_on_worker(job, None, board, None)
    assert [words[2] for words in said[2:]] == [0, 1, 2, 3] and said[2][1] != attempt

    listener = Listener()
    monkeypatch.setattr(listener, "started", lambda job: heard.append("started"))
    monkeypatch.setattr(listener, "step", lambda job, step, loss: heard.append(step))
    seen = engines._Seen(job)
    assert not seen.is_late(1e-9)  # it waits for a machine
    for words in (("a", 0, math.nan), ("a", 2, 4.0), ("a", 2, 4.0), ("a", 1, 4.5), ("b", 0, math.nan), ("b", 1, 4.5)):
        seen.hear(words, listener)
    assert heard == ["started", 2, "started", 1]
    assert not seen.is_late(60.0) and not seen.is_late(None)
    monkeypatch.setattr(engines, "GRACE_SECONDS", 0.0)
    assert seen.is_late(1e-9) and not seen.is_late(1e-9)  # said once


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1"])
def test_a_cluster_that_cannot_be_reached_is_refused_at_once(address, text_file, tmp_path):
    engine = {"name": "ray", "address": address}
    with pytest.raises(
        HeadloomError, match=r"the Ray cluster at '.*' cannot be reached .*: start it .ray start --head"
    ):
        Study(**VALUES, data=str(text_file), engine=engine).run(tmp_path / "s")
    assert not list((tmp_path / "s").glob("runs/*"))


def test_an_address_must_be_one(text_file, tmp_path):
    with pytest.raises(HeadloomError, match="must look like host:port"):
        Study(**VALUES, data=str(text_file), engine={"name": "ray", "address": "somewhere"}).run(tmp_path / "s")
