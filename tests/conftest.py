"""Common to all tests: one torch thread a process (or OMP_NUM_THREADS), no network, a fixed seed, defaults restored."""

from __future__ import annotations

import gc
import multiprocessing
import os
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="module", autouse=True)
def _collections_stay_short():
    """Every training collects garbage, several times: it need not walk over all that earlier modules left alive."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def held_elsewhere():
    """held_elsewhere(folder): another process writes the folder, until the test ends."""
    context = multiprocessing.get_context("fork")
    holders = []

    def hold(folder, ready):
        from headloom.core.locks import locked

        with locked(folder):
            ready.put(True)
            time.sleep(600)

    def start(folder):
        ready = context.SimpleQueue()
        holders.append(context.Process(target=hold, args=(folder, ready), daemon=True))
        holders[-1].start()
        assert ready.get()

    yield start
    for holder in holders:
        holder.kill()
        holder.join()


@pytest.fixture(autouse=True)
def _settled():
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
