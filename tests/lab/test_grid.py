"""Learning rates beyond the grid's edge: which are tried, in which order, and that a study that was stopped makes the
same ones. Runs are invented: their selection loss is a parabola over the logarithm of the rate."""

import json
import math
from pathlib import Path

import pytest

from headloom.core.errors import HeadloomError
from headloom.core.machine import machine
from headloom.lab.results.runs import rate_beyond
from headloom.lab.run.engines import inline
from headloom.lab.run.progress import Progress
from headloom.lab.run.status import study_status
from headloom.lab.run.work import Failed
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.study import Study
from headloom.records.runs import RunResult

BEST = {"mha": 0.00025, "iha": 0.03}  # two below the grid; four above, of which three are tried
RATES = [0.001, 0.002, 0.004]


class Told(Progress):
    def __init__(self):
        self.total, self.steps, self.ended = 0, 0, 0

    def start(self, runs, steps, done):
        self.total, self.steps, self.ended = runs, steps, done

    def more(self, runs, steps):
        self.total, self.steps = self.total + runs, self.steps + steps

    def ran(self, number, summary):
        self.ended += 1
        assert 1 <= number <= self.total


def invented(job, bundle, on_step):
    """What a run at this rate would leave."""
    if job.kind == "time":
        return {
            label: {"median": 0.01, "low": 0.01, "high": 0.01, "repeats": 9, "samples": [0.01]}
            for label in job.settings["runs"]
        }
    run, folder = job.settings["run"], Path(job.folder)
    made.append((run["name"].split("-")[0], run["learning_rate"], run["seed"]))
    if made[-1] == stop_at:
        raise KeyboardInterrupt
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(run))
    if run["learning_rate"] in diverging:
        raise Failed("its loss is nan")
    bits = 3 + 0.1 * math.log2(run["learning_rate"] / BEST[made[-1][0]]) ** 2 + 0.001 * run["seed"]
    numbers = dict.fromkeys(RunResult.model_fields, 1) | {
        "name": run["name"], "bits_per_byte": bits, "selection_bits_per_byte": bits, "weights": "w", "fingerprint": "f",
        "validation_text": "t", "versions": {}, "machine": machine(), "score_paths": {},
        "curve": [], "curve_text": "", "notes": [],
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(numbers))
    return numbers


made: list = []
diverging: set = set()
stop_at = None


@pytest.fixture
def run(text_file, tmp_path, monkeypatch):
    """Run the study in a folder: its results, and the runs it made."""
    monkeypatch.setattr(inline, "work", invented)

    def once(folder="s", stop=None, failing=(), **values):
        monkeypatch.setitem(globals(), "stop_at", stop)
        monkeypatch.setitem(globals(), "diverging", set(failing))
        made.clear()
        told = Told()
        study = Study.from_mapping(
            {
                "variants": ["mha", "iha:pseudo_heads=2"],
                "backbone": {"layers": 1, "width": 32, "heads": 2},
                "tokens": 16, "batch_size": 2, "steps": 4, "threads": 1, "validation_bytes": 2000,
                "data": str(text_file), "learning_rates": RATES, "seeds": 3, "grid_seeds": 1, "extend_grid": 3,
                "engine": {"name": "inline"}, **values,
            }
        )  # fmt: skip
        found = study.run(tmp_path / folder, progress=told, report=False)
        assert told.ended == told.total and told.steps == 4 * len(made)
        return found, list(made)

    return once


def test_the_best_rate_is_bracketed_or_said_not_to_be(run):
    found, runs = run()
    mha, iha = found.results["variants"]
    assert [p["learning_rate"] for p in mha["grid"]] == [0.000125, 0.00025, 0.0005, *RATES]
    assert mha["learning_rate"] == 0.00025 and not mha["grid_edge"] and mha["grid_added"] == 3
    assert [p["learning_rate"] for p in iha["grid"]] == [*RATES, 0.008, 0.016, 0.032]
    assert iha["learning_rate"] == 0.032 and iha["grid_edge"] and iha["grid_added"] == 3
    warnings = [text for text in found.results["warnings"] if "learning rate" in text]
    assert len(warnings) == 1
    assert "iha's best learning rate, 0.032, is the highest of its grid after 3 more were tried" in warnings[0]
    assert len(runs) == len(set(runs)) == 2 * (3 + 3 + 2)  # the grid, beyond it, and two seeds at the best
    assert [set(v["bits_per_byte"]["values"]) for v in (mha, iha)] == [{"0", "1", "2"}] * 2
    assert study_status(found.folder)["runs"] == {"finished": 16, "failed": 0, "waiting": 0}
    again, runs = run()
    assert not runs and again.results == found.results
    assert (
        "0.001, 0.002, 0.004 (and at most 3 beyond"
        in json.loads((found.folder / "study.json").read_text())["training_text"]
    )


def test_without_it_the_grid_ends_where_it_ends(run):
    found, runs = run(extend_grid=0)
    assert len(runs) == 2 * (3 + 2) and all(v["grid_edge"] and not v["grid_added"] for v in found.results["variants"])
    assert [v["learning_rate"] for v in found.results["variants"]] == [0.001, 0.004]


def test_a_study_that_was_stopped_tries_the_same_rates(run):
    whole, runs = run()
    for place in (("mha", 0.004, 0), ("mha", 0.0005, 0), ("iha", 0.016, 0), ("iha", 0.032, 1)):
        with pytest.raises(KeyboardInterrupt):
            run(f"cut-{place}", stop=place)
        before = made[:-1]
        status = study_status(whole.folder.parent / f"cut-{place}")["runs"]
        assert status["finished"] == len(before) and status["waiting"] > 0
        found, after = run(f"cut-{place}")
        assert sorted([*before, *after]) == sorted(runs)
        assert {**found.results, "hash": 0} == {**whole.results, "hash": 0}


def test_a_rate_that_diverges_bounds_the_grid(run):
    found, _ = run(failing=[0.008])
    mha, iha = found.results["variants"]
    assert mha["learning_rate"] == 0.00025
    assert iha["learning_rate"] == 0.004 and not iha["grid_edge"]
    assert [(p["learning_rate"], p["failed"]) for p in iha["grid"]] == [(rate, 0) for rate in RATES] + [(0.008, 1)]


def test_the_next_rate_keeps_the_ratio_at_its_own_edge():
    spec = resolve_study(Study(variants=("mha", "gqa"), learning_rates=(0.0003, 0.001, 0.002), extend_grid=2))
    rates = list(spec.learning_rates)
    assert rate_beyond(spec, rates, 0.0003) == 9e-5 and rate_beyond(spec, rates, 0.002) == 0.004
    assert rate_beyond(spec, rates, 0.001) is None and rate_beyond(spec, rates, None) is None
    assert rate_beyond(spec, [9e-5, *rates], 9e-5) == 2.7e-5
    assert rate_beyond(spec, [2.7e-5, 9e-5, *rates], 2.7e-5) is None
    with pytest.raises(HeadloomError, match="goes on beyond a grid, and there is one rate"):
        resolve_study(Study(variants=("mha", "gqa"), extend_grid=1))


def test_ready_studies_go_on_beyond_the_tiny_grid_only():
    for name in ("equal_parameters", "equal_time", "equal_flops", "spend_it_elsewhere"):
        assert resolve_study(Study.from_yaml(name, size="tiny")).extend_grid == 3
        assert resolve_study(Study.from_yaml(name)).extend_grid == 0
