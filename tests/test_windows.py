"""Systems without what POSIX has, and without extras: the package imports, and the laboratory runs or says what it
cannot do there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

# Windows as far as a program can tell: the libraries below the package are imported first, then what POSIX has is gone.
WINDOWS = """
import errno, fcntl, os, pkgutil, signal, sys
for extra in ("datasets", "pyarrow", "pandas", "peft", "trl", "gguf", "ray", "tensorboard", "trackio", "wandb"):
    sys.modules[extra] = None
import accelerate, altair, filelock, psutil, rich.progress, scipy.stats, tokenizers, torch, typer, vl_convert
import transformers.models.auto, transformers.trainer
import transformers.models.llama.modeling_llama

opened, synced = os.open, os.fsync

def open_file(path, flags, *rest, **more):
    if os.path.isdir(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)
    return opened(path, flags, *rest, **more)

def sync_written(handle, access=fcntl.fcntl, wanted=fcntl.F_GETFL):
    if access(handle, wanted) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, "Bad file descriptor")
    synced(handle)

os.open, os.fsync, sys.platform = open_file, sync_written, "win32"
for name in ("fork", "waitpid", "getppid", "sched_getaffinity", "getloadavg", "killpg", "setsid", "getuid", "uname"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGALRM", "SIGCHLD", "SIGUSR1"):
    delattr(signal, name)
sys.modules["fcntl"] = sys.modules["resource"] = sys.modules["pwd"] = sys.modules["termios"] = None

import headloom

for module in pkgutil.walk_packages(headloom.__path__, "headloom."):
    if not module.name.endswith("__main__"):
        __import__(module.name)

from pathlib import Path

study = dict(
    data=sys.argv[1], variants=["mha", "gqa"], seeds=1, statistics=False, tokens=16, batch_size=2, steps=3, threads=1
)
found = headloom.Study(**study, engine={"checkpoint_seconds": 0}).run(sys.argv[2], report=False)
assert [run["status"] for run in found.results["runs"]] == ["finished"] * 2, found.results["runs"]
names = [path.name for path in Path(sys.argv[2]).rglob("*")]
assert not [name for name in names if set(name) & set('<>:"|?*') or name.endswith((".", " "))], names
try:
    headloom.Study(**study, engine={"name": "local"}).run(sys.argv[2] + "-local", report=False)
except headloom.HeadloomError as error:
    print(error)
"""


def test_the_package_imports_and_runs_a_study_without_posix(tmp_path: Path):
    text = tmp_path / "words.txt"
    text.write_text("\n".join(f"line {i} of {i * i}" for i in range(3000)), encoding="utf-8")
    given = [sys.executable, "-c", WINDOWS, str(text), str(tmp_path / "study")]
    said = subprocess.run(given, capture_output=True, text=True)
    assert said.returncode == 0, said.stderr[-3000:]
    assert said.stdout == "engine local forks processes, which this system cannot do: use --engine inline\n"
    assert not (tmp_path / "study-local").exists()
