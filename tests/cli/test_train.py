import json

import pytest
from typer.testing import CliRunner

from headloom.cli.app import app

SMALL = ["hidden_size=16", "num_layers=1", "num_heads=2", "intermediate_size=24", "tokens=16", "batch_size=2",
         "validation_bytes=2000", "threads=1"]  # fmt: skip


def call(*arguments):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(f"the {i} foxes jump over {i * i % 97} dogs" for i in range(900)))
    return path


@pytest.fixture(scope="module")
def made(words, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "r"
    settings = [word for setting in SMALL for word in ("--set", setting)]
    arguments = ["--variant", "iha:pseudo_heads=2:order=token", "--data", words, "--steps", 20, *settings]
    return call(*arguments, "--learning-rate", 0.01, "--track", "tensorboard", "--out", out), out


def test_options_make_a_run(made, words):
    done, out = made
    assert done.exit_code == 0, done.output
    result = json.loads((out / "result.json").read_text())
    assert f"{result['bits_per_byte']:.4f} bits per byte on 2,000 bytes after 20 steps" in done.stdout
    config = json.loads((out / "config.json").read_text())
    assert (config["steps"], config["warmup_steps"], config["learning_rate"]) == (20, 2, 0.01)
    assert config["specs"] == [{"mechanism": "iha", "options": {"order": "token", "pseudo_heads": 2}}]


def test_tensorboard_has_every_step(made):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    _, out = made
    events = EventAccumulator(str(out / "tracking")).Reload()
    losses = events.Scalars("train/loss")
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    expected = [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]
    assert [point.step for point in losses] == [step for step, _ in expected] == list(range(1, 21))
    assert [point.value for point in losses] == pytest.approx([loss for _, loss in expected])


def test_a_column_of_a_csv_and_what_people_should_know_of_the_data(tmp_path):
    rows = "".join(f'"wrong","the {i} foxes, and {i * i % 97} dogs"\n' for i in range(60))
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "t.csv").write_text("text,body\n" + rows)
    (tmp_path / "set" / "picture.png").write_bytes(b"\0")
    settings = [word for setting in SMALL for word in ("--set", setting)]
    arguments = ["--data", tmp_path / "set", "--text-column", "body", "--steps", 2, *settings]
    done = call(*arguments, "--out", tmp_path / "r")
    assert done.exit_code == 0, done.output
    notes = json.loads((tmp_path / "r" / "result.json").read_text())["notes"]
    assert notes[0] == "left out of folder 'set': not UTF-8 text 1 (.png 1)" and "warning: little text" in notes[1]
    assert all(done.stderr.count(note) == done.output.count(note) == 1 for note in notes), "a terminal shows both"
    again = call(tmp_path / "r" / "run.yaml", "--out", tmp_path / "again", "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["notes"] == notes
    assert "Traceback" not in call(*arguments[:2], "--text-column", "no", "--out", tmp_path / "x").output


def test_the_json_beside_saved_data_is_no_text(tmp_path):
    """412 bytes of metadata made a table once."""
    (tmp_path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}' * 3)
    (tmp_path / "dataset_info.json").write_text('{"features": {"text": {"dtype": "string", "_type": "Value"}}}' * 3)
    done = call("--data", tmp_path, "--steps", 2, "--out", tmp_path / "r")
    assert done.exit_code == 2 and "cannot be loaded" in done.stderr and "Traceback" not in done.output


def test_its_file_makes_it_again(made, tmp_path, monkeypatch):
    _, out = made
    asked = []
    monkeypatch.setattr("headloom.cli.train.keep_freed", lambda: asked.append("keeps freed memory"))
    again = call(out / "run.yaml", "--out", tmp_path / "again", "--json")
    assert again.exit_code == 0, again.output
    assert asked == ["keeps freed memory"]
    first = json.loads((out / "result.json").read_text())
    assert json.loads(again.stdout)["weights"] == first["weights"]
    assert not (tmp_path / "again" / "tracking").exists()  # off by default
    changed = call(
        out / "run.yaml", "--steps", 2, "--set", "warmup_steps=0", "--checkpoint-activations", "--out", tmp_path / "c"
    )
    assert changed.exit_code == 0, changed.output
    config = json.loads((tmp_path / "c" / "config.json").read_text())
    assert (config["steps"], config["checkpoint_activations"]) == (2, True)


def test_python_m_takes_the_file_too(made, tmp_path, capsys):
    from headloom.train.__main__ import main

    _, out = made
    assert main([str(out / "run.yaml"), "--out", str(tmp_path / "r")]) == 0
    assert "bits per byte" in capsys.readouterr().out
    (tmp_path / "wrong.yaml").write_text((out / "run.yaml").read_text() + "stepz: 3\n")
    assert main([str(tmp_path / "wrong.yaml"), "--out", str(tmp_path / "w")]) == 2
    assert "Did you mean 'steps'?" in capsys.readouterr().err
    (tmp_path / "hot.yaml").write_text((out / "run.yaml").read_text().replace("0.01", "1.0e+30"))
    assert main([str(tmp_path / "hot.yaml"), "--out", str(tmp_path / "h")]) == 1
    assert "stopped at step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--variant", "ihaa"], "Did you mean 'iha'?"),
        (["--size", "tinny"], "Did you mean 'tiny'?"),
        (["--set", "batchsize=3"], "unknown key 'batchsize'. Did you mean 'batch_size'?"),
        (["--set", "batch_size=three"], "batch_size='three'"),
        (["--set", "batch_size"], "must look like key=value"),
        (["--track", "tensorbord"], "unknown tracker 'tensorbord'. Did you mean 'tensorboard'?"),
        (["--data", "nowhere"], "'nowhere' does not exist"),
        (["--set", "validation_bytes=0"], "validation_bytes=0"),
        (["nowhere.yaml"], "'nowhere.yaml' does not exist"),
        (["nowhere.yaml", "--size", "tiny"], "leave out either --variant and --size"),
    ],
)
def test_wrong_calls(arguments, part, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = call(*arguments, *([] if "--data" in arguments else ["--data", words]))
    assert done.exit_code == 2, done.output
    assert part in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_tracker_that_is_not_installed_is_named(monkeypatch, tmp_path):
    from headloom.core.errors import HeadloomError
    from headloom.train import tracking

    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(HeadloomError, match="pip install wandb"):
        tracking.check("wandb", tmp_path)


def test_trackers_write_into_the_runs_folder_and_send_nothing(tmp_path, monkeypatch):
    import os

    from headloom.train import tracking

    with tracking.environment("wandb", tmp_path):
        assert os.environ["WANDB_MODE"] == "offline" and os.environ["WANDB_DIR"] == str(tmp_path / "tracking")
    assert "WANDB_MODE" not in os.environ
    monkeypatch.setenv("WANDB_MODE", "online")
    with tracking.environment("wandb", tmp_path):
        assert os.environ["WANDB_MODE"] == "online"  # the caller's word
    assert os.environ["WANDB_MODE"] == "online"
    with tracking.environment(None, tmp_path / "none"):
        assert not (tmp_path / "none").exists()
