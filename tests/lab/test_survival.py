"""A study killed ten times at random moments gives the numbers of an undisturbed one, to the last bit."""

import json
import subprocess
import sys

import pytest

STUDY = """
name: killed
variants: [mha, "iha:pseudo_heads=2"]
backbone: {layers: 1, width: 16, heads: 2}
tokens: 16
batch_size: 2
steps: 4
seeds: 1
statistics: false
threads: 1
learning_rates: [0.001, 0.004]
extend_grid: 1
validation_bytes: 500
engine: {name: inline, checkpoint_seconds: 0, workers: 1}
"""

# One process that imports, and forks a study for every life: a kill costs no imports.
LIVES = """
import json, os, pathlib, random, signal, sys, tempfile, time
import headloom as hl
import headloom.lab.plan.timing, headloom.train.run
headloom.lab.plan.timing.REPEATS = 1

def live(file, out, moments=0):
    # a process that runs the study; SIGKILL ends it at the last of so many moments, those in which it touches a file
    pid = os.fork()
    if pid == 0:
        seen = 0

        def touched(event, arguments):
            nonlocal seen
            if event == "open" or event.startswith("os."):
                seen += 1
                if seen == moments:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(touched)
        try:
            hl.Study.from_yaml(file).run(out, report=False)
            (out / "moments").write_text(str(seen))
            os._exit(0)
        finally:
            os._exit(9)
    return pid

def end(pid):
    return os.waitpid(pid, 0)[1]

file, local, folder = map(pathlib.Path, sys.argv[1:])
assert end(live(file, folder / "whole")) == 0
lasts = int((folder / "whole" / "moments").read_text())
rng = random.Random(6)
died = [end(live(file, folder / "killed", int(lasts * rng.uniform(0.05, 0.4)))) == signal.SIGKILL for _ in range(10)]
assert end(live(file, folder / "killed")) == 0

def command(out):
    # over the local engine; the pipe ends when every process that was started has ended
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(writes, 2)
        os.close(writes)
        sys.argv[1:] = ["study", "run", str(local), "--out", str(out)]
        from headloom.cli.app import main
        main()
    os.close(writes)
    return pid, open(reads)

def trains(metrics, lines):
    while not (metrics.exists() and metrics.read_bytes().count(b"\\n") > lines):
        time.sleep(0.1)

tempfile.tempdir = os.environ["TMPDIR"] = str(folder / "tmp")
os.mkdir(tempfile.tempdir)
metrics = folder / "local" / "runs" / "mha-lr0.001-seed0" / "metrics.jsonl"
pid, said = command(folder / "local")
trains(metrics, 5)
os.kill(pid, signal.SIGKILL)
died.append(end(pid) == signal.SIGKILL)
last_words = [said.read()]
before = metrics.read_bytes()
pid, said = command(folder / "local")
trains(metrics, before.count(b"\\n") + 5)
os.kill(pid, signal.SIGTERM)
status = os.waitstatus_to_exitcode(end(pid))
last_words.append(said.read())
print(json.dumps({"died": died, "lines": before.count(b"\\n"), "last words": last_words, "status": status,
                  "left": os.listdir(tempfile.tempdir)}))
"""


def numbers(folder):
    """Everything but seconds: results by run, and every line of metrics."""
    results = json.loads((folder / "results.json").read_text())
    assert results["status"] == "complete"
    found = {}
    for run in results["runs"]:
        lines = [json.loads(line) for line in (folder / run["folder"] / "metrics.jsonl").read_text().splitlines()]
        result = json.loads((folder / run["folder"] / "result.json").read_text())
        found[run["folder"]] = (
            [{key: value for key, value in line.items() if key != "seconds"} for line in lines],
            {key: result[key] for key in ("bits_per_byte", "selection_bits_per_byte", "weights", "train_loss")},
            run["chosen"],
        )
    return found, results["headlines"][:1], [v["difference"] for v in results["variants"]]


@pytest.fixture(scope="module")
def lived(tmp_path_factory, text_file):
    folder = tmp_path_factory.mktemp("lives")
    files = folder / "inline.yaml", folder / "local.yaml"
    files[0].write_text(STUDY + f"data: {text_file}\n")
    files[1].write_text(files[0].read_text().replace("inline", "local").replace("steps: 4", "steps: 4000"))
    arguments = [sys.executable, "-W", "ignore", "-c", LIVES, *files, folder]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return folder, json.loads(done.stdout)


def test_killed_ten_times_at_random_moments(lived):
    folder, told = lived
    assert all(told["died"])
    assert numbers(folder / "killed") == numbers(folder / "whole")
    assert len(numbers(folder / "whole")[0]) == 6  # the grid of each, and one rate beyond it
    assert not list((folder / "killed").glob("runs/*/checkpoints"))


def test_a_killed_study_leaves_no_run_training(lived):
    """The local engine's processes end with the study that started them, and silently: else its pipe would not end."""
    _, told = lived
    assert told["died"][-1]
    assert told["lines"] < 4000
    assert "Error" not in told["last words"][0] and "Traceback" not in told["last words"][0]


def test_sigterm_ends_the_workers_and_says_how_to_go_on(lived):
    folder, told = lived
    lines = told["last words"][1].splitlines()
    assert told["status"] == 143
    assert lines[-1].startswith("stopped: 0 of 4 runs are finished and kept; to go on: headloom study run")
    assert sum("stopped" in line for line in lines) == 1 and "Traceback" not in told["last words"][1]
    assert json.loads((folder / "local" / "results.json").read_text())["status"] == "partial"


def test_no_temporary_file_is_left_behind(lived):
    assert lived[1]["left"] == []
