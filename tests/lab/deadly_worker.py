"""A worker of the local engine whose runs do to their process what their name says."""

import errno
import os
import signal
import sys
import time
from types import SimpleNamespace

import headloom.train.run as runs
from headloom.core.errors import RunError
from headloom.core.heap import freed_memory
from headloom.lab.run import worker


def train(run, data, tokenizer, folder, on_progress, **options):
    on_progress(1, 2, 5.5)
    print("said by", run.name, "with freed memory", freed_memory())
    if run.name == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if run.name == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if run.name == "worker killed":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(1)
        os._exit(0)
    if run.name == "orphaned":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
        (folder / "outlived its worker").touch()
        os._exit(0)
    if run.name == "slow":
        time.sleep(600)
    if run.name == "gone":
        os._exit(7)
    if run.name == "broken":
        raise KeyError("a fault of ours")
    if run.name == "memory":
        raise MemoryError
    if run.name == "full":
        raise OSError(errno.ENOSPC, "No space left on device")
    if run.name == "nan":
        raise RunError("its loss is nan")
    return SimpleNamespace(bits_per_byte=2.5, train_seconds=float(os.getpid()))


runs.train = train
worker.serve(sys.argv[1])
