"""The command that a comparison leaves on its page makes the same comparison again, whatever option it was given."""

import json
import shlex

import pytest
import typer

from headloom.cli.app import app
from headloom.core.errors import HeadloomError
from headloom.lab import compare as lab

# a value that is not the default, for every option that says what is compared or how
GIVEN = {
    "variants": ["--variants", "mha,iha:pseudo_heads=2:rope_scaling={rope_type: linear, factor: 2.0}"],
    "settings": ["--set", "iha.order=token"],
    "seeds": ["--seeds", "2"],
    "size": ["--size", "small"],
    "layers": ["--layers", "3"],
    "width": ["--width", "96"],
    "heads": ["--heads", "4"],
    "config": ["--config", "llama.json"],
    "tokens": ["--context", "96"],
    "data": ["--data", "my texts.csv"],
    "text_column": ["--data", "my texts.csv", "--text-column", "body"],
    "tokenizer": ["--tokenizer", "bpe:300"],
    "steps": ["--steps", "7"],
    "batch_size": ["--batch-size", "5"],
    "learning_rate": ["--learning-rate", "0.00123456789"],
    "evaluations": ["--evaluations", "3"],
    "dtype": ["--dtype", "bfloat16"],
    "threads": ["--threads", "2"],
    "device": ["--device", "cpu"],
    "compiled": ["--compile"],
    "track": ["--track", "tensorboard"],
}
# where the folder is stands beside the command, and how the result is printed is no part of it
NOT_RECORDED = {"out", "as_json", "help"}


@pytest.fixture
def recorded(call, monkeypatch, tmp_path):
    """recorded("--steps", 7): what such a call would carry out, and the command it would leave."""
    monkeypatch.chdir(tmp_path)
    sizes = {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 34}
    (tmp_path / "llama.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 500.0, **sizes}))
    (tmp_path / "my texts.csv").write_text("text,body\na,b\n")
    asked = []

    def instead(study, spec, command, *_):
        asked.append((study, spec, command))
        raise HeadloomError("not carried out")

    monkeypatch.setattr(lab, "carry_out", instead)

    def one(*words):
        done = call("compare", *words)
        assert done.stderr.rstrip().endswith("not carried out"), done.stderr
        study, spec, command = asked[-1]
        what = spec.model_dump()
        for variant in what["variants"]:  # options that came from defaults.toml are spelled out in the command
            del variant["defaulted"]
        return what, study.engine.track, command

    return one


def test_every_option_of_compare_is_in_the_recorded_command(recorded):
    options = {option.name for option in typer.main.get_command(app).commands["compare"].params}
    assert options - NOT_RECORDED == set(GIVEN), "an option without a value here: give it one"
    usual = recorded()
    for name, words in GIVEN.items():
        *asked, command = recorded(*words)
        assert asked != list(usual[:2]), name
        again = recorded(*shlex.split(command)[2:])
        assert [*again] == [*asked, command], name
