"""`headloom bench`: what it prints, writes and refuses. No seconds are asserted."""

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import headloom
from headloom.cli.app import app
from headloom.core.errors import HeadloomError

PAGE = (Path(headloom.__file__).parent.parent / "docs" / "performance.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^headloom bench ((?:.*\\\n)*.*)$", PAGE, re.MULTILINE)

TINY = ["--hidden-size", "16", "--heads", "2", "--tokens", "8", "--threads", "1", "--repeats", "2"]
RECORDED = {
    "benchmark",
    "device",
    "dtype",
    "threads",
    "repeats",
    "machine",
    "versions",
    "load_average",
    "variants",
    "rows",
}


def call(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture(scope="module")
def speed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "out"
    arguments = ["--variants", "mha,iha:pseudo_heads=2", *TINY, "--modes", "forward,step,train", "--against-hf"]
    with pytest.MonkeyPatch.context() as patch:  # the loops themselves have their own test
        for loop in ("ours", "theirs"):
            patch.setattr(f"headloom.bench.pace.Pace.{loop}", lambda pace, model: 0.5)
        return call("speed", *arguments, "--out", str(folder), "--json"), folder


def test_speed_as_json(speed):
    done, folder = speed
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert RECORDED | {"variants", "rows", "peak", "skipped", "sizes", "compiled"} <= set(result)
    assert result == json.loads((folder / "bench.json").read_text())
    assert result["sizes"] == {"hidden_size": 16, "num_heads": 2, "rope_theta": 10000.0}
    assert result["variants"]["iha"] == {"mechanism": "iha", "options": {"pseudo_heads": 2}}
    rows = [(row["variant"], row["mode"]) for row in result["rows"]]
    assert rows == [
        ("mha", "forward"),
        ("iha", "forward"),
        ("mha", "step"),
        ("iha", "step"),
        ("LlamaForCausalLM", "step"),
        ("mha", "train"),
        ("iha", "train"),
        ("LlamaForCausalLM", "train"),
    ]
    assert result["rows"][-1]["seconds"]["samples"] == [0.5, 0.5]
    assert result["threads"] == 1 and result["peak"]["flops_per_second"] > 0
    assert "forward, 8 tokens x 1" in done.stderr and "step of a model, tiny" in done.stderr


def test_what_is_written(speed):
    done, folder = speed
    names = {path.name for path in folder.iterdir()}
    assert names == {"bench.json", "bench.md", "speed.svg", "speed.png", "step.svg", "step.png"}
    assert (folder / "speed.svg").read_text().startswith("<svg")
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")
    text = (folder / "bench.md").read_text()
    rows = json.loads(done.stdout)["rows"]
    assert f"{rows[1]['ratio']['median']:.2f} (" in text and f"| {rows[2]['parameters']:,} |" in text
    assert f"| {rows[0]['utilisation_exact']:.0%} ({rows[0]['utilisation_full']:.0%}) |" in text


def test_memory_and_decode_for_people():
    done = call("memory", "--variants", "mha", *TINY[:-2], "--markdown")
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[0] == "| variant | mode | tokens | batch | peak | times mha |"
    assert "repetitions" not in done.stdout
    done = call("decode", "--variants", "iha,iha:cache=expanded", *TINY[:4], "--contexts", "4,8", "--new-tokens", "2")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == ["iha:pseudo_heads=2", "iha:cache=expanded:pseudo_heads=2"] * 2
    assert "times the first" in lines[0] and "…" not in done.stdout
    assert lines[4].rstrip().endswith("2.0 KiB") and lines[3].rstrip().endswith("1.0 KiB")


def test_the_scores_alone_for_people():
    variants = "mha,hybrid:window=4"
    done = call("speed", "--part", "scores", "--modes", "backward", "--variants", variants, *TINY, "--markdown")
    assert done.exit_code == 0, done.output
    heading, _, mha, hybrid = done.stdout.splitlines()[:4]
    assert "| a layer's scores | times mha |" in heading
    assert "| 1.00 (1.00-1.00) |" in mha and hybrid.startswith("| hybrid | backward | 8 | 1 |")


def test_models_and_what_is_left_out(monkeypatch):
    monkeypatch.setattr("headloom.bench.models._free", lambda setting: 2**30)
    done = call(
        "models", "--sizes", "tiny,350M", "--variants", "mha", "--tokens", "8", "--batch-size", "1", "--repeats", "1"
    )
    assert done.exit_code == 0, done.output
    assert done.stdout.splitlines()[1].split()[:4] == ["mha", "step", "tiny", "8"]
    (left,) = [line for line in done.stdout.splitlines() if line.startswith("left out")]
    assert left.startswith("left out: mha, step, 350M, 8 tokens x 1: needs 5.") and left.endswith(" GiB, 0.9 available")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["speed", "--variants", "mhaa"], "unknown mechanism 'mhaa'. Did you mean 'mha'?"),
        (["speed", "--variants", "mha,mha"], "given twice"),
        (["speed", "--variants", ""], "needs at least one variant"),
        (["speed", "--modes", "backwards"], "unknown mode 'backwards'. Did you mean 'backward'?"),
        (["speed", "--modes", "step", "--against", "a:B"], "add one to --modes"),
        (["speed", "--against-hf"], "add --modes step"),
        (["speed", "--part", "score"], "unknown part 'score'. Did you mean 'scores'?"),
        (["speed", "--part", "scores", "--modes", "forward,step"], "remove the others from --modes"),
        (["speed", "--part", "scores", "--against-plain"], "have no other form"),
        (["speed", "--against", "no.where:Module", "--variants", "mha"], "'no.where' cannot be imported"),
        (["speed", "--tokens", "many"], "--tokens must be whole numbers separated by commas"),
        (["speed", "--device", "cuda"], "torch sees none"),
        (["speed", "--size", "tinny"], "Did you mean 'tiny'?"),
        (["speed", "--hidden-size", "0"], "hidden_size must be at least 1, not 0"),
        (["speed", "--json", "--markdown"], "cannot go together"),
        (["memory", "--dtype", "int8"], "dtype must be one of"),
        (["decode", "--contexts", "0"], "contexts must be at least 1"),
        (["models", "--sizes", "125m"], "unknown size '125m'"),
        (["models", "--modes", "stepp"], "unknown mode 'stepp'. Did you mean 'step'?"),
        (["models", "--sizes", "tiny", "--dtype", "float64"], "float32 or bfloat16"),
    ],
)
def test_wrong_calls(arguments, part, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    done = call(*arguments)
    assert done.exit_code == 2 and done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ") and part in last


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "taken").write_text("")
    done = call("memory", *TINY[:-2], "--out", str(tmp_path / "taken"))
    assert done.exit_code == 2 and "is a file" in done.stderr


@pytest.mark.parametrize("stops", ["by Ctrl-C", "by an error", "killed"])
def test_what_was_measured_outlives_the_end(stops, tmp_path, monkeypatch):
    """Stopped at the second point: the first is printed and written; killed there, it is written already."""
    from headloom.bench import layers

    class Killed(BaseException):
        pass

    measured, seen = layers.peak_bytes, []

    def at_the_second_point(*arguments):
        seen.append(arguments)
        if len(seen) == 3:
            raise {"by Ctrl-C": KeyboardInterrupt, "by an error": HeadloomError("too much"), "killed": Killed}[stops]
        return measured(*arguments)

    monkeypatch.setattr(layers, "peak_bytes", at_the_second_point)
    command = ("memory", "--variants", "mha,gqa", *TINY[:-2], "--out", str(tmp_path / "out"), "--markdown")
    if stops == "killed":
        with pytest.raises(Killed):
            CliRunner().invoke(app, ["bench", *command], catch_exceptions=False)
    else:
        done = call(*command)
        assert done.exit_code == (130 if stops == "by Ctrl-C" else 2)
        assert ("error: too much" in done.stderr) == (stops == "by an error")
        assert "| mha | forward |" in done.stdout and "backward" not in done.stdout
        assert "- interrupted: what stands here is all that was measured until then\n" in done.stdout
        assert (tmp_path / "out" / "memory.svg").exists()
    kept = json.loads((tmp_path / "out" / "bench.json").read_text())
    assert [(row["variant"], row["mode"]) for row in kept["rows"]] == [("mha", "forward"), ("gqa", "forward")]
    assert kept["interrupted"] is True
    assert "interrupted" in (tmp_path / "out" / "bench.md").read_text()


def test_freed_memory_is_kept_unless_told_otherwise(monkeypatch):
    from headloom.core import heap

    command = ("speed", "--variants", "mha", *TINY[:-1], "1", "--modes", "forward")
    monkeypatch.setattr(heap, "_glibc", object)
    monkeypatch.setattr(heap, "_kept", False)
    monkeypatch.setattr(heap, "keep_freed", lambda: monkeypatch.setattr(heap, "_kept", True))
    assert json.loads(call(*command, "--json").stdout)["machine"]["freed_memory"] == "kept"
    monkeypatch.setattr(heap, "_kept", False)
    monkeypatch.setattr(heap, "keep_freed", None)  # not to be called
    assert "; freed memory returned to the system\n" in call(*command, "--return-memory", "--markdown").stdout
    monkeypatch.setattr(heap, "_kept", True)
    done = call(*command, "--return-memory")
    assert done.exit_code == 2 and "already keeps freed memory" in done.stderr
    monkeypatch.setattr(heap, "_glibc", lambda: None)
    done = call(*command, "--return-memory")
    assert done.exit_code == 2 and "another C library: leave it out" in done.stderr


def test_ctrl_c_before_anything_is_measured(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("headloom.bench.layers.peak_bytes", interrupt)
    done = call("memory", *TINY[:-2], "--out", str(tmp_path / "out"))
    assert done.exit_code == 130 and done.stdout == "" and not (tmp_path / "out").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_the_pages_commands_are_right(command, monkeypatch):
    """Options, variants and sizes are taken; only the measurement itself is left out."""
    ran = []
    monkeypatch.setattr("headloom.cli.bench._run", lambda name, how, named, *_, **options: ran.append((name, named)))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    done = call(*shlex.split(command.replace("\\\n", " ")))
    assert done.exit_code == 0, done.output
    assert ran[0][0] == command.split()[0] and ran[0][1]


def test_no_command_of_the_page_was_missed():
    assert len(COMMANDS) == PAGE.count("\nheadloom bench ") == 22
