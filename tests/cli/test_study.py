import json

import pytest
from typer.testing import CliRunner

from headloom.cli.app import app

STUDY = """
title: A small one
variants: [mha, "iha:pseudo_heads=2"]
backbone: {layers: 1, width: 16, heads: 2}
tokens: 16
batch_size: 2
steps: 3
seeds: 2
threads: 1
validation_bytes: 2000
learning_rates: [0.001, 0.004]
grid_seeds: 1
engine: {name: inline}
"""


def call(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    (folder / "words.txt").write_text("\n".join(f"the {i} foxes jump over {i * i % 97} dogs" for i in range(900)))
    (folder / "small.yaml").write_text(STUDY + f"data: {folder / 'words.txt'}\n")
    return call("study", "run", folder / "small.yaml", "--set", "steps=4", "--out", folder / "s"), folder


def test_run_makes_a_study_and_says_what_it_found(made):
    done, folder = made
    assert done.exit_code == 0, done.output
    results = json.loads((folder / "s" / "results.json").read_text())
    for line in (*results["headlines"], *results["warnings"], results["summary"], f"The page: {folder}/s/report.html"):
        assert line in done.stdout
    assert "6/6 iha seed 1 at" in done.stderr
    assert all(done.output.count(note) == 1 for note in results["notes"])
    manifest = json.loads((folder / "s" / "study.json").read_text())
    assert manifest["command"] == f"headloom study run {folder / 'small.yaml'} --set steps=4"
    assert (manifest["name"], manifest["title"], manifest["spec"]["steps"]) == ("small", "A small one", 4)


def test_run_again_keeps_every_run(made):
    _, folder = made
    again = call("study", "run", folder / "small.yaml", "--set", "steps=4", "--out", folder / "s", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["status"] == "complete"
    assert "6 of 6 runs are finished already" in again.stderr


def test_a_written_study_makes_the_same_study(made):
    _, folder = made
    again = call("study", "run", folder / "s" / "study.yaml", "--out", folder / "s", "--json")
    assert again.exit_code == 0, again.output
    assert "6 of 6 runs are finished already" in again.stderr


def test_status(made):
    _, folder = made
    done = call("study", "status", folder / "s")
    assert "6 finished, 0 failed, 0 waiting of 6 runs; not running" in done.stdout
    (folder / "s" / "runs" / "mha-lr0.001-seed0" / "result.json").rename(folder / "kept.json")
    try:
        found = json.loads(call("study", "status", folder / "s", "--json").stdout)
        assert found["runs"]["finished"] < 6 and sum(found["runs"].values()) == 6 and not found["running"]
    finally:
        (folder / "kept.json").rename(folder / "s" / "runs" / "mha-lr0.001-seed0" / "result.json")
    from headloom.core.locks import locked

    with locked(folder / "s"):
        assert json.loads(call("study", "status", folder / "s", "--json").stdout)["running"]


def test_report_writes_the_page_again(made):
    _, folder = made
    (folder / "s" / "report.html").unlink()
    done = call("study", "report", folder / "s")
    assert done.exit_code == 0 and (folder / "s" / "report.html").is_file()
    assert "iha is " in done.stdout


def test_diff_of_studies_and_of_variants(made):
    _, folder = made
    found = json.loads(call("study", "diff", folder / "small.yaml", folder / "s", "--json").stdout)
    steps = found["variants.mha.shape.steps"]
    assert list(steps.values()) == [3, 4]
    assert not any("label" in key for key in found)
    inside = json.loads(call("study", "diff", f"{folder}/s@mha", f"{folder}/s@iha", "--json").stdout)
    assert list(inside["mechanism"].values()) == ["mha", "iha"]
    assert "steps" not in inside and "attention.pseudo_heads" in inside
    assert "no difference" in call("study", "diff", "equal_time", "equal_time").stdout
    text = call("study", "diff", "equal_time", "equal_flops", "--size", "tiny").stdout
    assert "budgets.time.match" in text and "equal_flops" in text


def test_list():
    found = json.loads(call("study", "list", "--json").stdout)
    assert {"equal_time", "heads_sweep"} <= {entry["name"] for entry in found}
    assert all(entry["sizes"] == ["125M", "tiny"] for entry in found)
    assert "Which attention is best at equal training time" in call("study", "list").stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run", "equal_tim"], "Did you mean 'equal_time'?"),
        (["run", "equal_time", "--size", "tin"], "unknown size 'tin'. Did you mean 'tiny'?"),
        (["run", "equal_time", "--set", "stepz=3"], "Did you mean 'steps'?"),
        (["run", "equal_time", "--set", "seeds=1"], "one seed gives no interval"),
        (["run", "equal_time", "--engine", "rya"], "engine.name"),
        (["status", "nowhere"], "holds no study"),
        (["report", "nowhere"], "holds no study.json"),
        (["diff", "equal_time@mha", "equal_time"], "is no study's folder"),
    ],
)
def test_wrong_calls(arguments, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call("study", *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert part in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_failed_run_gives_status_one(made, tmp_path):
    _, folder = made
    bad = ["--set", "learning_rates=[1.0e+30]", "--set", "steps=30", "--set", "grid_seeds=null"]
    done = call("study", "run", folder / "small.yaml", *bad, "--out", tmp_path / "s")
    assert done.exit_code == 1 and "stopped at step" in done.stdout
    assert "4 failed" in call("study", "status", tmp_path / "s").stdout
