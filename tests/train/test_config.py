"""RunConfig: strict, frozen, round trips, and says in one line what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

import headloom
from headloom.core.errors import HeadloomError
from headloom.train.config import LayerSpec, RunConfig

SIZES = {"name": "r", "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24, "steps": 4}


def test_round_trips_through_json():
    run = RunConfig(**SIZES, specs=[("iha", {"pseudo_heads": 2}), "mha"], betas=(0.9, 0.99), threads=2)
    assert run.specs == (LayerSpec(mechanism="iha", options={"pseudo_heads": 2}), LayerSpec(mechanism="mha"))
    assert RunConfig(**json.loads(json.dumps(run.to_dict()))) == run


def test_is_frozen():
    run = RunConfig(**SIZES, specs=["mha"])
    with pytest.raises(ValidationError, match="frozen"):
        run.seed = 3  # type: ignore[misc]


def test_micro_batch_size_cuts_the_batch():
    assert RunConfig(**SIZES, specs=["mha"], batch_size=12, accumulation_steps=4).micro_batch_size == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"learning_rates": 1.0}, "unknown field 'learning_rates'. Did you mean 'learning_rate'"),
        ({"steps": 0}, "steps=0: input should be greater than or equal to 1"),
        ({"steps": "many"}, "steps='many'"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"learning_rate": -1.0}, "learning_rate=-1.0"),
        ({"specs": []}, "specs"),
        ({"specs": ["mha"] * 3}, "specs has 3 mechanisms for 2 layers"),
        ({"batch_size": 6, "accumulation_steps": 4}, "batch_size 6 does not divide into accumulation_steps 4"),
        ({"warmup_steps": 5}, "warmup_steps 5 exceeds steps 4"),
        ({"betas": (0.9, 1.0)}, "must lie in"),
        ({"tokens": 1}, "tokens=1"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"hidden_size": None}, "hidden_size=None"),
    ],
)
def test_bad_values_are_one_line(changes, words):
    with pytest.raises(HeadloomError, match=words) as error:
        RunConfig(**(SIZES | {"specs": ["mha"]} | changes))
    assert "\n" not in str(error.value)


def test_a_missing_field_is_named():
    with pytest.raises(HeadloomError, match="'specs' is required"):
        RunConfig(**SIZES)


def test_configurations_do_not_load_the_trainer():
    code = "import sys, headloom.train.config; print('transformers.trainer' in sys.modules)"
    root = str(Path(headloom.__file__).parents[1])
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": root}
    )
    assert out.stdout.strip() == "False"
