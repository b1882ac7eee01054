"""A disk that takes no more: one line, nothing half-made, nothing of the user's touched; the same command goes on."""

import json
import subprocess
import sys

import pytest

ROOM = 6000  # bytes a file: settings and tokenizers fit, weights do not


def one_line(done):
    assert done.exit_code == 1 and "Traceback" not in done.output, done.output
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "is full" in line and "free some space, and give the same command again" in line
    return line


@pytest.fixture(scope="module")
def grafted(llama_folder, tmp_path_factory):
    from transformers import AutoModelForCausalLM

    import headloom as hl

    folder = tmp_path_factory.mktemp("grafted")
    model = AutoModelForCausalLM.from_pretrained(llama_folder)
    model = hl.graft(model, "iha", pseudo_heads=1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("command", ["graft", "fold"])
def test_a_checkpoint_that_does_not_fit(command, call, llama_folder, grafted, small_files, tmp_path):
    mine = tmp_path / "out.partial"
    mine.mkdir()
    (mine / "thesis.tex").write_text("mine")
    arguments = [llama_folder, tmp_path / "out", "--to", "iha", "--set", "pseudo_heads=1"]
    arguments = [command, *(arguments if command == "graft" else [grafted, tmp_path / "out"])]
    with small_files(ROOM):
        done = call(*arguments)
    assert "nothing was saved" in one_line(done)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.partial"]
    assert call(*arguments).exit_code == 0
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["out", "out.partial"]
    assert (mine / "thesis.tex").read_text() == "mine"


def test_two_grafts_into_one_place(call, llama_folder, held_elsewhere, tmp_path):
    held_elsewhere(tmp_path / "new" / "out", beside=True)
    done = call("graft", llama_folder, tmp_path / "new" / "out", "--to", "iha", "--set", "pseudo_heads=1")
    assert done.exit_code == 2 and "another process is writing" in done.stderr
    assert not (tmp_path / "new" / "out").exists()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(f"the {i} foxes jump over {i * i % 97} dogs" for i in range(400)))
    return path


def test_finetune(call, llama_folder, words, small_files, tmp_path):
    out = tmp_path / "out"
    arguments = ["finetune", llama_folder, "--data", words, "--out", out, "--to", "iha", "--set", "pseudo_heads=1",
                 "--only-grafted", "--tokens", 16, "--batch-size", 2, "--steps", 2, "--threads", 1,
                 "--validation-bytes", 600]  # fmt: skip
    with small_files(ROOM):
        done = call(*arguments)
    assert "goes on from its last checkpoint" in one_line(done)
    left = sorted(path.name for path in (out / "grafted" / "seed-0").rglob("*"))
    assert left == ["checkpoints", "config.json", "metrics.jsonl"]
    done = call(*arguments, "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["complete"]
    assert (out / "grafted" / "seed-0" / "model" / "model.safetensors").is_file()


def test_output_that_nobody_can_write():
    """stdout into a full disk."""
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-W", "ignore", "-m", "headloom", "list", "--json"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line == "error: the disk is full ([Errno 28] No space left on device): free some space"
