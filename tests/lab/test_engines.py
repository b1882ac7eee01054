"""The local engine: whatever befalls a run befalls that run alone."""

import re
from pathlib import Path

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.run.engines import Listener, local, open_engine
from headloom.lab.run.engines.local import Local
from headloom.lab.run.work import Bundle, Failed, Job, reason, work
from headloom.lab.spec import study

FATES = (
    "good",
    "segfault",
    "killed",
    "worker killed",
    "orphaned",
    "slow",
    "gone",
    "broken",
    "memory",
    "full",
    "nan",
    "good again",
)


class Told(Listener):
    def __init__(self):
        self.began, self.steps, self.results, self.reasons = [], [], {}, {}

    def started(self, job):
        self.began.append(job.name)

    def step(self, job, step, loss):
        self.steps.append((job.name, step, loss))
        if job.name == "slow":
            self.hangs()

    def done(self, job, result):
        self.results[job.name] = result

    def failed(self, job, reason):
        self.reasons[job.name] = reason


def job(name, folder):
    sizes = {"hidden_size": 8, "num_layers": 1, "num_heads": 1, "intermediate_size": 8, "steps": 1}
    run = {"name": name, "specs": ["mha"], **sizes}
    settings = {"run": run, "flops_per_token": 1.0, "checkpoint_seconds": 60.0, "track": None}
    return Job(name, "train", str(folder / name), settings)


@pytest.fixture(scope="module")
def told(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    found = Told()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local, "WORKER", (str(Path(__file__).with_name("deadly_worker.py")),))
        with Local(Bundle(None, None, None), workers=2, threads=1) as engine:
            engine.run([job(name, folder) for name in FATES if name != "slow"], found)
            found.hangs = lambda: setattr(engine, "_timeout", 0.1)  # from then on: the others may take as long
            engine.run([job("slow", folder)], found)
            engine._timeout = None
            with pytest.raises(Failed, match="nan: its loss is nan"):
                engine.one(job("nan", folder))
            assert engine.one(job("good", folder))["bits_per_byte"] == 2.5
    found.folder = folder
    return found


def test_every_run_begins_and_ends(told):
    assert sorted(told.began) == sorted(FATES)
    assert sorted([*told.results, *told.reasons]) == sorted(FATES)
    assert {name for name, step, loss in told.steps if (step, loss) == (1, 5.5)} == set(FATES)


def test_good_runs_are_done_each_in_a_process_of_its_own(told):
    assert set(told.results) == {"good", "good again"}
    assert told.results["good"]["train_seconds"] != told.results["good again"]["train_seconds"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("segfault", "its process was killed by SIGSEGV"),
        ("killed", "its process was killed by SIGKILL, as the system does when memory runs out"),
        ("worker killed", "its worker process was killed by SIGKILL"),
        ("orphaned", "its worker process was killed by SIGKILL"),
        ("slow", r"timed out after \d+ s \(engine.timeout\)"),
        ("gone", "its process ended with status 7"),
        ("broken", r"its process ended with status 1 \(its log.txt says more\)"),
        ("memory", r"out of memory \(MemoryError"),
        ("full", "the disk is full"),
        ("nan", "its loss is nan"),
    ],
)
def test_reasons(told, name, part):
    assert re.search(part, told.reasons[name])


def test_a_run_ends_with_its_worker(told):
    """The study hears of the worker's end when its run has ended too: no timeout is needed for that."""
    assert not (told.folder / "orphaned" / "outlived its worker").exists()


def test_what_a_process_says_is_in_the_runs_folder(told):
    assert "KeyError: 'a fault of ours'" in (told.folder / "broken" / "log.txt").read_text()
    assert "Segmentation fault" in (told.folder / "segfault" / "log.txt").read_text()  # faulthandler's
    said = (told.folder / "good" / "log.txt").read_text()
    assert "said by good" in said and "returned" not in said


def test_workers_that_do_not_start_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local, "WORKER", ("-c", "raise SystemExit(3)"))
    with (
        pytest.raises(HeadloomError, match=r"workers do not start \(ended with status 3"),
        Local(Bundle(None, None, None), workers=1, threads=1) as engine,
    ):
        for _ in range(3):
            engine.run([job("good", tmp_path)], Told())


def test_the_engine_is_the_one_that_is_named():
    assert isinstance(open_engine(study.EngineOptions(name="local", workers=3), None, threads=1), Local)
    assert open_engine(study.EngineOptions(name="local", workers=3), None, threads=1)._most == 3
    monkey = open_engine(study.EngineOptions(), None, threads=10_000)
    assert monkey._most == 1  # as many as fit, and one at least
    with pytest.raises(HeadloomError, match="engine"):
        study.WrittenStudy(variants=("mha", "iha"), engine={"name": "slurm"})


def test_what_is_a_failure_of_a_run_and_what_is_ours(monkeypatch, tmp_path):
    assert "out of memory (RuntimeError: CUDA out of memory" in reason(RuntimeError("CUDA out of memory. Tried"))
    assert reason(RuntimeError("two\nlines")) == "RuntimeError: two lines"

    def train(*_, **__):
        raise KeyError("ours")

    monkeypatch.setattr("headloom.train.run.train", train)
    with pytest.raises(KeyError):
        work(job("x", tmp_path), Bundle(None, None, None), lambda step, loss: None)


@pytest.mark.parametrize("said", [{}, {"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_threads_of_workers_wait_briefly_unless_told_otherwise(said, monkeypatch):
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(local._Slot, "_start", lambda slot: started.append(slot._environment))
    local._Slot(0, threads=3, gpu=None)
    found = {name: started[0].get(name) for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    assert found == {
        "OMP_NUM_THREADS": "3",
        "OMP_WAIT_POLICY": said.get("OMP_WAIT_POLICY"),
        "GOMP_SPINCOUNT": said.get("GOMP_SPINCOUNT", None if said else "1000"),
    }
