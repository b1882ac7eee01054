"""One writer a folder: who is refused, who waits, and what a kill leaves."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys

import pytest

from headloom.core.errors import HeadloomError
from headloom.core.locks import LOCK, is_locked, locked

FORK = multiprocessing.get_context("fork")


def hold(path, answers, wait=False):
    try:
        with locked(path, wait=wait):
            answers.put("taken")
    except HeadloomError as error:
        answers.put(str(error))


def in_another_process(path, answers, **options):
    process = FORK.Process(target=hold, args=(path, answers), kwargs=options)
    process.start()
    return process


def test_a_second_process_is_refused_and_a_second_call_of_the_holder_is_not(tmp_path):
    answers = FORK.SimpleQueue()
    with locked(tmp_path):
        in_another_process(tmp_path, answers).join()
        with locked(tmp_path):
            assert is_locked(tmp_path)
        in_another_process(tmp_path, answers).join()
    assert [answers.get() for _ in range(2)] == [
        f"another process is writing '{tmp_path}': wait for it, or choose another --out"
    ] * 2
    assert not is_locked(tmp_path)
    hold(tmp_path, answers)
    assert answers.get() == "taken"


def test_one_that_waits_is_not_refused(tmp_path):
    answers = FORK.SimpleQueue()
    with locked(tmp_path):
        waiting = in_another_process(tmp_path, answers, wait=True)
        in_another_process(tmp_path, answers).join()
        assert "another process" in answers.get() and answers.empty()
    waiting.join()
    assert answers.get() == "taken"


def test_a_killed_holder_blocks_nobody(tmp_path):
    def hold_and_die(ready):
        with locked(tmp_path):
            ready.put(is_locked(tmp_path))
            os.kill(os.getpid(), signal.SIGKILL)

    ready = FORK.SimpleQueue()
    process = FORK.Process(target=hold_and_die, args=(ready,))
    process.start()
    assert ready.get() is True
    process.join()
    assert process.exitcode == -signal.SIGKILL and (tmp_path / LOCK).is_file() and not is_locked(tmp_path)
    with locked(tmp_path):
        pass


def test_a_folder_made_for_nothing_is_gone_again(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path / "a" / "b"):
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with locked(tmp_path / "a" / "b"):
        (tmp_path / "a" / "b" / "mine").write_text("")
        assert (tmp_path / "a" / "b" / LOCK).is_file()
    assert [entry.name for entry in (tmp_path / "a" / "b").iterdir()] == ["mine"]
    (tmp_path / "empty").mkdir()
    with locked(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").is_dir(), "not ours to remove"


def test_files_and_places_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(HeadloomError, match="is a file, not a folder"), locked(tmp_path / "file"):
        pass
    with pytest.raises(HeadloomError, match=r"cannot be written \(Not a directory\)"), locked(tmp_path / "file" / "a"):
        pass
    assert not is_locked(tmp_path / "nowhere") and not is_locked(tmp_path / "file")


def test_the_laboratory_is_imported_where_there_is_no_fcntl():
    """As on Windows. Libraries below may use it; what asks for it from our own files fails."""
    code = (
        "import builtins, json, pkgutil, importlib, sys\n"
        "real = builtins.__import__\n"
        "def watching(name, globals=None, *rest, **more):\n"
        "    asking = (globals or {}).get('__name__', '')\n"
        "    if name in ('fcntl', 'resource', 'pwd', 'grp', 'termios') and asking.startswith('headloom'):\n"
        "        raise ModuleNotFoundError(f'{asking} asks for {name}')\n"
        "    return real(name, globals, *rest, **more)\n"
        "builtins.__import__ = watching\n"
        "import headloom.lab, headloom.train, headloom.cli\n"
        "names = [m.name for p in (headloom.lab, headloom.train, headloom.cli)\n"
        "         for m in pkgutil.walk_packages(p.__path__, p.__name__ + '.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(json.dumps(names))"
    )
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert {"headloom.lab.run.worker", "headloom.lab.run.engines.cluster", "headloom.cli.app"} <= set(
        json.loads(done.stdout)
    )
