"""Common to all tests: one torch thread a process (or OMP_NUM_THREADS), no network, a fixed seed, defaults restored."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import time
from contextlib import contextmanager

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
from hypothesis import HealthCheck, settings

# "ci": the same few examples every time. "many" (`pytest --hypothesis-profile many`): new ones, as many as you like
settings.register_profile(
    "ci", derandomize=True, database=None, deadline=None, max_examples=10, suppress_health_check=list(HealthCheck)
)
settings.register_profile("many", settings.get_profile("ci"), derandomize=False, max_examples=200, print_blob=True)
settings.load_profile("ci")

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="module", autouse=True)
def _collections_stay_short():
    """Every training collects garbage, several times: it need not walk over all that earlier modules left alive."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def held_elsewhere():
    """held_elsewhere(folder): another process writes the folder, until the test ends; `beside`: makes it."""
    context = multiprocessing.get_context("fork")
    holders = []

    def hold(folder, beside, ready):
        from headloom.core.locks import claimed, locked

        with claimed(folder) if beside else locked(folder):
            ready.put(True)
            time.sleep(600)

    def start(folder, *, beside=False):
        ready = context.SimpleQueue()
        holders.append(context.Process(target=hold, args=(folder, beside, ready), daemon=True))
        holders[-1].start()
        assert ready.get()

    yield start
    for holder in holders:
        holder.kill()
        holder.join()


@pytest.fixture
def small_files():
    """with small_files(size): no file may grow beyond so many bytes, as if the disk were full."""

    @contextmanager
    def limited(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


@pytest.fixture(autouse=True)
def _settled():
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
