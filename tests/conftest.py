"""Common to all tests: one torch thread a process, no network, a fixed seed, defaults restored."""

from __future__ import annotations

import gc
import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _collections_stay_short():
    """Every training collects garbage, several times: it need not walk over all that earlier modules left alive."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _settled():
    torch.manual_seed(0)
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)
