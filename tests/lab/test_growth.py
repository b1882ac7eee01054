"""A finished study that is asked for again with more in it: runs whose configuration is the same are used again."""

import json

import pytest
import yaml
from lab.manifests import hold

from headloom.core.errors import HeadloomError
from headloom.lab.plan import timing
from headloom.lab.run import growth
from headloom.lab.run.progress import Progress
from headloom.lab.run.runner import Interrupted
from headloom.lab.run.status import study_status
from headloom.lab.study import Study
from headloom.records.manifest import SET_ASIDE
from headloom.records.runs import CONFIG, FAILURE, RunFailure

TWO = ["mha", "iha:pseudo_heads=2"]


class Told(Progress):
    def __init__(self, stop=None):
        self.runs, self.stop = [], stop

    def run(self, name, number):
        self.runs.append(name)
        if len(self.runs) == self.stop:
            raise KeyboardInterrupt


@pytest.fixture(scope="module")
def study(text_file):
    """study(key=value, ...): a study whose runs take a moment, measured by an invented clock."""
    small = {
        "backbone": {"layers": 1, "width": 16, "heads": 2},
        "budgets": [{"match": "time", "knob": "steps"}],
        "data": str(text_file),
        "tokens": 16, "batch_size": 2, "steps": 2, "threads": 1, "validation_bytes": 500, "evaluations": 0,
        "seeds": 1, "statistics": False, "engine": {"name": "inline"},
    }  # fmt: skip
    seconds = {"mha": 0.01, "iha": 0.02, "sas": 0.005}

    def step_times(runs, data, tokenizer):
        measured.append(sorted(runs))
        found = {label: seconds[run.specs[0].mechanism] * speed[0] for label, run in runs.items()}
        return {label: {"median": s, "low": s, "high": s, "repeats": 9, "samples": []} for label, s in found.items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "step_times", step_times)
        yield lambda variants=TWO, **values: Study.from_mapping({**small, "variants": variants, **values})


measured: list = []
speed = [1.0]


def run(study, out, **options):
    """The results, the runs that were made for them, and what was measured."""
    measured.clear()
    told = Told(**options)
    results = study.run(out, progress=told, report=False).results
    return results, told.runs, list(measured)


def numbers(results):
    return {(r["variant"], r["seed"]): (r["bits_per_byte"], r["weights"]) for r in results["runs"]}


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/*") if path.name != ".lock"}


def notes(results):
    return " ".join(results["notes"])


@pytest.fixture
def grown(study, tmp_path):
    """mha and iha with one seed, and then with sas and a second one, on a machine that has become half as fast."""
    run(study(), tmp_path / "s")
    before = files(tmp_path / "s")
    speed[0] = 2.0
    try:
        found = run(study([*TWO, "sas"], seeds=2), tmp_path / "s")
    finally:
        speed[0] = 1.0
    return tmp_path / "s", before, found


def test_only_what_is_missing_is_made(grown, study, tmp_path):
    folder, before, (results, runs, asked) = grown
    assert runs == ["sas seed 0", "mha seed 1", "iha seed 1", "sas seed 1"]
    assert before.items() <= files(folder).items()
    whole, _, _ = run(study([*TWO, "sas"], seeds=2), tmp_path / "whole")
    assert numbers(results) == numbers(whole) and results["status"] == "complete"
    # a step of sas takes half of mha's: four steps in mha's two, although the machine is slower by now
    assert asked == [["mha", "sas"]]
    assert [v["steps"] for v in results["variants"]] == [2, 1, 4] == [v["steps"] for v in whole["variants"]]
    assert [v["step_ratio"] for v in results["variants"]] == pytest.approx([1, 2, 0.5])
    assert "sas joined the study later" in notes(results) and "joined" not in notes(whole)


def test_the_records_are_of_what_was_asked_last(grown, study):
    folder, _, (results, _, _) = grown
    manifest = json.loads((folder / "study.json").read_text())
    assert manifest["hash"] == results["hash"] and manifest["spec"]["seeds"] == [0, 1]
    assert set(manifest["timing"]) == set(manifest["frozen"]) == {"mha", "iha", "sas"}
    assert yaml.safe_load((folder / "study.yaml").read_text())["seeds"] == 2
    assert study_status(folder)["runs"] == {"finished": 6, "failed": 0, "waiting": 0}
    again = run(study([*TWO, "sas"], seeds=2), folder)
    assert again == (results, [], [])


def test_what_is_left_out_is_kept_and_comes_back(grown, study):
    folder, _, (full, _, _) = grown
    before = files(folder)
    results, runs, _ = run(study(["mha", "sas"], seeds=2), folder)
    assert runs == [] and {v["label"] for v in results["variants"]} == {"mha", "sas"}
    assert "kept and not counted here: 2 (runs/iha-seed0, runs/iha-seed1)" in notes(results)
    again, runs, asked = run(study([*TWO, "sas"], seeds=2), folder)
    assert (runs, asked) == ([], []) and numbers(again) == numbers(full) and files(folder) == before
    assert "not counted" not in notes(again)


def test_a_label_that_changes_takes_its_runs_along(study, tmp_path):
    before, _, _ = run(study(), tmp_path)
    results, runs, _ = run(study([*TWO, "iha:pseudo_heads=3"]), tmp_path)
    assert runs == ["iha:pseudo_heads=3 seed 0"]
    assert numbers(results)["iha:pseudo_heads=2", 0] == numbers(before)["iha", 0]
    config = json.loads((tmp_path / "runs" / "iha-pseudo_heads=2-seed0" / "config.json").read_text())
    assert config["name"] == "iha:pseudo_heads=2-seed0"
    assert run(study(), tmp_path)[1] == []


def test_another_configuration_of_the_same_label_pushes_no_run_out(study, tmp_path):
    before, _, _ = run(study(), tmp_path)
    results, runs, _ = run(study(["mha", "iha:pseudo_heads=3"]), tmp_path)
    assert runs == ["iha seed 0"] and numbers(results)["iha", 0] != numbers(before)["iha", 0]
    assert "kept and not counted here: 1 (set_aside/iha-seed0-" in notes(results)
    again, runs, _ = run(study(), tmp_path)
    assert runs == [] and numbers(again) == numbers(before)


def test_learning_rates_are_added_to_a_grid(study, tmp_path):
    run(study(learning_rates=[0.001, 0.004]), tmp_path)
    _, runs, _ = run(study(learning_rates=[0.001, 0.004, 0.008]), tmp_path)
    assert runs == ["mha seed 0 at 0.008", "iha seed 0 at 0.008"]


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"steps": 3}, "steps 2 there, 3 here"),
        ({"tokenizer": "bpe:300"}, "tokenizer 'bytes' there, 'bpe:300' here"),
        ({"threads": 2}, "threads 1 there, 2 here"),
        ({"seeds": [4]}, r"seeds \[0\] there, \[4\] here"),
        ({"learning_rates": [0.5]}, "learning_rates"),
    ],
)
def test_what_makes_every_run_another_is_refused_before_the_text_is_read(study, tmp_path, monkeypatch, values, part):
    from headloom.lab.spec.resolve import resolve_study

    hold(tmp_path, "x", spec=resolve_study(study()).model_dump(mode="json"))
    monkeypatch.setattr("headloom.data.corpus.load_corpus", lambda *_: pytest.fail("the text was read"))
    with pytest.raises(HeadloomError, match=rf"holds another study \({part}.*choose another --out.*: its own command"):
        study(**values).run(tmp_path)


def test_another_text_is_refused_before_it_is_tokenised(study, tmp_path, monkeypatch):
    (tmp_path / "other.txt").write_text("\n".join(f"{i} other words in another text" for i in range(400)))
    run(study(), tmp_path / "s")
    monkeypatch.setattr("headloom.data.packing.prepare", lambda *_, **__: pytest.fail("it was tokenised"))
    with pytest.raises(HeadloomError, match=r"another study \(data '[0-9a-f]{12}' there, '[0-9a-f]{12}' here\)"):
        study(data=str(tmp_path / "other.txt"), seeds=3).run(tmp_path / "s")


def test_growth_that_is_stopped_goes_on(grown, study, tmp_path, monkeypatch):
    folder, _, _ = grown
    three = study([*TWO, "sas"], seeds=3)
    with pytest.raises(Interrupted, match="6 of 9 runs are finished"):
        run(three, folder, stop=1)
    results, runs, _ = run(three, folder)
    assert runs == ["mha seed 2", "iha seed 2", "sas seed 2"] and results["status"] == "complete"

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "step_times", stopped)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(Interrupted, match="is as it was; to go on: "):
        study([*TWO, "gqa"], seeds=2).run(folder, report=False)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_two_runs_that_change_places(tmp_path):
    """Each stands where the other is looked for."""
    for name, width in (("a", 1), ("b", 2)):
        place = tmp_path / "runs" / name
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"name": name, "width": width}))
        FAILURE.write(place, RunFailure(name=name, seed=width, reason="of its own"))
    wanted = {"runs/a": {"name": "a", "width": 2}, "runs/b": {"name": "b", "width": 1}}
    assert growth.arrange(tmp_path, wanted) and not growth.arrange(tmp_path, wanted)
    for place, config in wanted.items():
        assert CONFIG.read(tmp_path / place) == config
        failure = FAILURE.read(tmp_path / place)
        assert (failure.name, failure.seed) == (config["name"], config["width"])
    assert not list((tmp_path / SET_ASIDE).iterdir())
