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
import json, os, pathlib, psutil, random, signal, sys, time
import headloom as hl
import headloom.lab.timing, headloom.train.run
headloom.lab.timing.REPEATS = 1

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

pid = live(local, folder / "local")
metrics = folder / "local" / "runs" / "mha-lr0.001-seed0" / "metrics.jsonl"
while not (metrics.exists() and metrics.stat().st_size > 500):
    time.sleep(0.1)
workers = psutil.Process(pid).children(recursive=True)
os.kill(pid, signal.SIGKILL)
died.append(end(pid) == signal.SIGKILL)
_, alive = psutil.wait_procs(workers, timeout=900)
lines = metrics.read_bytes().count(b"\\n")
print(json.dumps({"died": died, "workers": len(workers), "alive": len(alive), "lines": lines}))
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
    """The local engine's processes end with the study that started them."""
    _, told = lived
    assert told["died"][-1] and told["workers"] >= 2 and told["alive"] == 0
    assert told["lines"] < 4000
