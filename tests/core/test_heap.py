"""Freed memory is kept where that was asked for, and given back on request."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import headloom
from headloom.core import heap

MIB = 1 << 20
SCRIPT = """
import json, resource, sys
from headloom.core import heap

def faults(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def step():  # as a training step: large blocks, made and dropped
    blocks = [bytearray(b"x") * (48 << 20), bytearray(b"x") * (3 << 20)]

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

said = [sys.argv[1] == "keep" and heap.keep_freed(), heap.freed_memory()]
step()
found = {"said": said, "faults": faults(step), "held": held()}
heap.give_back()
print(json.dumps({**found, "given_back": found["held"] - held()}))
"""


def run(how):
    root = Path(headloom.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, cwd=root, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(heap._glibc() is None, reason="other allocators cannot be told what to do with freed memory")
def test_memory_is_kept_only_when_asked():
    kept, usual = run("keep"), run("usual")
    assert kept["said"] == [True, "kept"] and usual["said"] == [False, "returned"]
    assert kept["faults"] * 10 < usual["faults"], "the second step found the first one's memory"
    assert kept["given_back"] > 48 * MIB


def test_other_allocators_are_left_alone(monkeypatch):
    monkeypatch.setattr(heap.ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(heap, "_kept", False)
    assert heap.keep_freed() is False and heap.freed_memory() is None
    heap.give_back()
