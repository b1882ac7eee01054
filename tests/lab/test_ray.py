"""The Ray engine on a cluster of this machine: two workers, one of which is killed."""

import math
import os
import signal
import threading
import time
from collections import Counter

import psutil
import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.engines import cluster as engines
from headloom.lab.progress import Progress
from headloom.lab.study import Engine, Study
from headloom.lab.work import Bundle, Failed, Foreign, Job

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
    deadline = time.monotonic() + 120
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
    assert len(lines) == 151
    assert (tmp_path / "there" / "runs" / "iha-seed1" / "mixes.npz").is_file()

    assert list((tmp_path / "there" / "runs" / "iha-seed1" / "tracking").iterdir())
    assert [told.steps[number][-1] for number in (1, 2, 3, 4)] == [150] * 4
    assert told.ended.keys() == told.begun.keys() == {1, 2, 3, 4}

    slow, told = {**study, "steps": 5000}, Told()
    engine = {"name": "ray", "timeout": 1.5}
    late = Study(**slow, engine=engine).run(tmp_path / "late", report=False, progress=told)
    assert [run["reason"].split(" after")[0] for run in late.failed] == ["timed out"] * 4
    assert all(steps == sorted(set(steps)) for steps in told.steps.values())
    assert any(len(steps) > 1 for steps in told.steps.values())  # seen while they went on, not only at their end


HANGS = """
import time
time.sleep(600)
"""


def test_a_run_that_hangs_is_killed(cluster, tmp_path, monkeypatch):
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setattr(engines, "GRACE_SECONDS", 0.3)
    bundle = Bundle(None, None, None, (Foreign("hangs_at_once", "None", str(tmp_path / "hangs.py")),))
    run = Job("stuck", "train", str(tmp_path / "r"), {"run": {"device": "cpu"}})
    with (
        engines.RayEngine(bundle, Engine(name="ray", timeout=0.5), threads=1) as engine,
        pytest.raises(Failed, match=r"stuck: timed out after \d+ s \(engine.timeout\)"),
    ):
        engine.one(run)


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
