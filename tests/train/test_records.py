"""The run's folder: complete, readable at any moment, and never another run's."""

from __future__ import annotations

import json
import platform

import pytest
import torch

import headloom
from headloom.core.errors import HeadloomError, RunError
from headloom.core.locks import LOCK
from headloom.core.machine import machine, ran_on, versions
from headloom.records.metrics import read_metrics, read_train_lines
from headloom.records.runs import CONFIG, RESULT
from headloom.train import folder as folders
from headloom.train.config import RunConfig
from headloom.train.run import build, resolve, train


def test_a_complete_run_leaves_configuration_metrics_and_result(run_tiny, data, tokenizer, make_config):
    result, folder = run_tiny()
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "result.json"]
    run = RunConfig(**CONFIG.read(folder))
    assert run == resolve(make_config(), data, tokenizer)
    assert (run.vocab_size, run.threads, run.device, run.eval_batch_size) == (258, 1, "cpu", 4)
    assert run.fingerprint == data.fingerprint == result.fingerprint
    assert RESULT.read(folder) == result
    assert result.versions["torch"] == torch.__version__ and result.machine.cores >= 1
    assert "token-weighted" in result.validation_text and "context 16" in result.validation_text


def test_lines_are_on_disk_as_they_happen_and_the_result_comes_last(run_tiny, tmp_path):
    seen = []

    def look(step, steps, loss):
        folder = tmp_path / "run0"
        seen.append((len(read_train_lines(folder)), (folder / "result.json").exists()))

    run_tiny(on_progress=look, steps=4)
    assert seen == [(1, False), (2, False), (3, False), (4, False)]


def test_a_run_whose_loss_is_not_finite_stops_and_stays_readable(run_tiny, tmp_path):
    with pytest.raises(
        RunError, match=r"run 'tiny' stopped at step \d of 50: its .* is (nan|inf).*lower learning rate"
    ) as error:
        run_tiny(learning_rate=1e30, steps=50)
    assert "\n" not in str(error.value)
    folder = tmp_path / "run0"
    failure = json.loads((folder / "failure.json").read_text())
    metrics = read_metrics(folder)
    assert failure["reason"] == str(error.value) and failure["step"] == len(metrics) + 1 < 50
    assert metrics and all(line.kind == "train" and line.loss > 0 for line in metrics)
    assert json.loads((folder / "config.json").read_text())["learning_rate"] == 1e30
    assert not (folder / "result.json").exists()
    with pytest.raises(HeadloomError, match=r"holds no result\.json: the run is not complete"):
        RESULT.read(folder)


@pytest.mark.parametrize("what", ["loss", "gradient norm"])
def test_a_single_bad_step_is_caught_where_it_happens(run_tiny, tmp_path, what):
    def breaking(run, tokenizer):
        model = build(run, tokenizer)
        calls = iter(range(10**6))

        def poison(module, inputs, output):
            if next(calls) == 2:  # the third step
                if what == "loss":
                    return output * float("nan")
                output.register_hook(lambda gradient: gradient * float("inf"))
            return output

        model.lm_head.register_forward_hook(poison)
        return model

    with pytest.raises(RunError, match=f"stopped at step 3 of 6: its {what} is (nan|inf)"):
        run_tiny(make_model=breaking)
    assert [line.step for line in read_metrics(tmp_path / "run0")] == [1, 2]


def test_a_validation_that_is_not_finite_stops_the_run(run_tiny, tmp_path):
    def breaking(run, tokenizer):
        model = build(run, tokenizer)
        model.lm_head.register_forward_hook(
            lambda module, i, output: output if module.training else output * float("nan")
        )
        return model

    with pytest.raises(RunError, match="validation loss is nan"):
        run_tiny(make_model=breaking)
    assert len(read_metrics(tmp_path / "run0")) == 6


def test_the_same_folder_takes_the_same_run_again_and_no_other(data, tokenizer, make_config, tmp_path):
    first = train(make_config(), data, tokenizer, tmp_path / "run", make_model=build)
    (tmp_path / "run" / "failure.json").write_text("{}")
    again = train(make_config(), data, tokenizer, tmp_path / "run", make_model=build)
    assert first.bits_per_byte == again.bits_per_byte and not (tmp_path / "run" / "failure.json").exists()
    with pytest.raises(HeadloomError, match=r"holds another run \(it differs in learning_rate, seed\)"):
        train(make_config(seed=1, learning_rate=0.5), data, tokenizer, tmp_path / "run", make_model=build)
    assert RESULT.read(tmp_path / "run") == again


def test_saved_models_load_with_their_tokenizer(run_tiny, data, capfd):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from headloom.evaluate import bits_per_byte

    assert headloom
    result, folder = run_tiny(save_model=True, make_model=build)
    assert capfd.readouterr().err == ""  # no bar
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert model.config.use_cache
    assert bits_per_byte(model, data.validation, context=16).bits_per_byte == pytest.approx(
        result.bits_per_byte, rel=1e-6
    )
    assert AutoTokenizer.from_pretrained(folder / "model")("é")["input_ids"] == [0xC3, 0xA9]


def test_folders_of_others_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(HeadloomError, match="is a file, not a folder"):
        folders.prepare_folder(file, {})
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(HeadloomError, match=r"records without a config\.json"):
        folders.prepare_folder(tmp_path, {})
    (tmp_path / "config.json").write_text("{broken")
    with pytest.raises(HeadloomError, match=r"config\.json' is damaged, no JSON: "):
        folders.prepare_folder(tmp_path, {"seed": 1})
    assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"


def test_a_folder_that_another_process_writes_is_refused(run_tiny, held_elsewhere, tmp_path):
    held_elsewhere(tmp_path / "run0")
    with pytest.raises(HeadloomError, match=r"another process is writing .*: wait for it, or choose another --out"):
        run_tiny()
    assert [entry.name for entry in (tmp_path / "run0").iterdir()] == [LOCK]


def test_the_record_names_no_host_and_no_path():
    told = json.dumps(ran_on("an accelerator") | versions())
    assert platform.node() not in told and "/" not in told.replace("Linux", "")
    assert ran_on("an accelerator")["accelerator"] == "an accelerator" and "accelerator" not in ran_on()
    assert machine().items() < ran_on("an accelerator").items() and "freed_memory" not in machine()
