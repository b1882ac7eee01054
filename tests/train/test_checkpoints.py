"""A run that is cut goes on to the numbers it would have had."""

from __future__ import annotations

import dataclasses
import shutil

import numpy as np
import pytest
import torch

from headloom.core.files import DiskFull, write_json
from headloom.mechanism import Attention
from headloom.ops.mixing import Mix
from headloom.records.metrics import read_metrics, read_train_lines
from headloom.train import checkpoints
from headloom.train.run import build, train
from headloom.train.weights import checksum


class Cut(Exception):
    pass


def cut_at(*steps):
    """A progress that breaks off once in each of `steps`, before the step's checkpoint is written."""
    left = set(steps)

    def on_progress(step, total, loss):
        if step in left:
            left.remove(step)
            raise Cut

    return on_progress


def in_pieces(run, data, tokenizer, folder, on_progress, **options):
    pieces = 0
    while True:
        try:
            return train(run, data, tokenizer, folder, on_progress, checkpoint_seconds=0, **options), pieces
        except Cut:
            pieces += 1


def numbers(folder):
    return [
        {key: value for key, value in record.to_dict().items() if key != "seconds"} for record in read_metrics(folder)
    ]


@pytest.mark.parametrize("cuts", [(3, 5), (1,), (6,)])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_six_steps_are_two_and_two_and_two(data, tokenizer, make_config, tmp_path, cuts, accumulation):
    """Cut in steps 3 and 5: 2 + 2 + 2 steps. Weights, losses and norms are bit-equal, with attention dropout."""
    run = make_config(
        specs=[("iha", {"pseudo_heads": 2, "dropout": 0.1})], accumulation_steps=accumulation, evaluations=2
    )
    held = data.validation
    data = dataclasses.replace(data, leading=dataclasses.replace(held, ids=held.ids[:201], bytes=200))
    whole = train(run, data, tokenizer, tmp_path / "whole", checkpoint_seconds=None)
    assert [point.step for point in whole.curve] == [2, 4, 6]
    seen = []
    cutting = cut_at(*cuts)

    def watch(step, total, loss):
        seen.append(step)
        cutting(step, total, loss)

    pieced, pieces = in_pieces(run, data, tokenizer, tmp_path / "cut", watch)
    assert pieces == len(cuts)
    assert seen == sorted([1, 2, 3, 4, 5, 6, *cuts])  # each piece goes on where the last checkpoint stood
    assert pieced.weights == whole.weights
    assert (pieced.bits_per_byte, pieced.train_loss) == (whole.bits_per_byte, whole.train_loss)
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")
    assert [(p.step, p.bits_per_byte) for p in pieced.curve] == [(p.step, p.bits_per_byte) for p in whole.curve]
    assert pieced.score_paths["blocks"] >= whole.score_paths["blocks"] > 0
    assert not (tmp_path / "cut" / "checkpoints").exists()


def test_a_half_written_checkpoint_is_removed_and_the_one_before_is_used(data, tokenizer, make_config, tmp_path):
    run = make_config()
    whole = train(run, data, tokenizer, tmp_path / "whole")
    folder = tmp_path / "cut"
    with pytest.raises(Cut):
        train(run, data, tokenizer, folder, cut_at(4), checkpoint_seconds=0)
    place = folder / "checkpoints"
    assert [path.name for path in place.iterdir()] == ["step-3"]
    shutil.copytree(place / "step-3", place / "checkpoint-5")  # a kill while it was written: no mark, no name
    (place / "checkpoint-5" / "complete.json").unlink()
    (place / "checkpoint-5" / "model.safetensors").write_bytes(b"half")
    (place / "step-9").mkdir()
    seen = []
    again = train(run, data, tokenizer, folder, lambda step, *_: seen.append(step), checkpoint_seconds=None)
    assert seen == [4, 5, 6]
    assert again.weights == whole.weights


def test_a_checkpoint_whose_records_are_lost_is_not_used(data, tokenizer, make_config, tmp_path):
    run, folder = make_config(), tmp_path / "cut"
    with pytest.raises(Cut):
        train(run, data, tokenizer, folder, cut_at(4), checkpoint_seconds=0)
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(lines[:2]))
    seen = []
    train(run, data, tokenizer, folder, lambda step, *_: seen.append(step))
    assert seen == [1, 2, 3, 4, 5, 6]


def test_a_checkpoint_that_does_not_fit_is_gone_and_the_one_before_is_used(
    data, tokenizer, make_config, tmp_path, small_files
):
    run, folder, undisturbed = make_config(), tmp_path / "full", tmp_path / "whole"
    with pytest.raises(Cut):
        train(run, data, tokenizer, folder, cut_at(3), checkpoint_seconds=0)
    before = [path.name for path in (folder / "checkpoints").iterdir()]
    with small_files(6000), pytest.raises(DiskFull, match="what was finished is kept and whole; free some space"):
        train(run, data, tokenizer, folder, checkpoint_seconds=0)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == before == ["step-2"]
    assert not (folder / "failure.json").exists()
    train(run, data, tokenizer, folder)
    train(run, data, tokenizer, undisturbed, checkpoint_seconds=None)
    assert numbers(folder) == numbers(undisturbed)


def test_seconds_go_on_from_the_checkpoint(data, tokenizer, make_config, tmp_path):
    run = make_config()
    result, _ = in_pieces(run, data, tokenizer, tmp_path / "cut", cut_at(4))
    seconds = [line.seconds for line in read_train_lines(tmp_path / "cut")]
    assert len(seconds) == 6 and seconds == sorted(seconds)
    assert result.train_seconds == pytest.approx(seconds[-1])


def test_only_marked_checkpoints_count(tmp_path):
    for step in (2, 10):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    assert checkpoints.latest(tmp_path) is None
    write_json(tmp_path / "checkpoints" / "step-2" / "complete.json", {"step": 2, "score_paths": {}})
    assert checkpoints.latest(tmp_path).step == 2
    checkpoints.remove_incomplete(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-2"]


def test_mixes_are_left_as_trained_and_flops_are_counted(data, tokenizer, make_config, tmp_path):
    held = []
    run = make_config(specs=[("iha", {"pseudo_heads": 2})], steps=2)
    train(
        run,
        data,
        tokenizer,
        tmp_path / "a",
        flops_per_token=10.0,
        make_model=lambda run, tok: held.append(build(run, tok)) or held[0],
    )
    mixes = {f"{path}.weight": m.weight for path, m in held[0].named_modules() if isinstance(m, Mix)}
    with np.load(tmp_path / "a" / "mixes.npz") as saved:
        assert set(saved) == set(mixes) and len(mixes) == 2 * 4
        for name, weight in mixes.items():
            np.testing.assert_array_equal(saved[name], weight.detach().numpy())
    assert [line.flops for line in read_metrics(tmp_path / "a")] == [
        4 * 15 * 10.0,
        2 * 4 * 15 * 10.0,
        2 * 4 * 15 * 10.0,
    ]
    train(make_config(steps=1, warmup_steps=0), data, tokenizer, tmp_path / "b")
    assert not (tmp_path / "b" / "mixes.npz").exists() and not (tmp_path / "b" / "pictures.npz").exists()
    assert read_metrics(tmp_path / "b")[0].flops is None


@pytest.mark.parametrize("specs", [[("iha", {"pseudo_heads": 2})], ["sas"]])
def test_pictures_hold_the_weights_before_and_after_also_of_a_run_that_was_cut(
    data, tokenizer, make_config, tmp_path, specs
):
    run = make_config(specs=specs, num_layers=1, steps=4)
    held = []

    def make(run, tokenizer):
        model = build(run, tokenizer)
        held.append((model, {name: weight.clone() for name, weight in model.state_dict().items()}))
        return model

    in_pieces(run, data, tokenizer, tmp_path / "a", cut_at(3), make_model=make)
    model, start = held[-1]
    (attention,) = [module for module in model.modules() if isinstance(module, Attention)]
    with np.load(tmp_path / "a" / "pictures.npz") as saved:
        for picture in attention.pictures():
            name = f"model.layers.0.self_attn.{picture.weight}"
            size = len(picture.rows), len(picture.columns)
            np.testing.assert_array_equal(saved[f"{name}/start"], start[name].numpy().reshape(size))
            np.testing.assert_array_equal(saved[f"{name}/end"], model.state_dict()[name].numpy().reshape(size))
            assert (saved[f"{name}/start"] != saved[f"{name}/end"]).any()
            assert tuple(saved[f"{name}/rows"]) == picture.rows and tuple(saved[f"{name}/columns"]) == picture.columns
            assert tuple(saved[f"{name}/axes"]) == (picture.down, picture.across)
        assert len(saved.files) == 5 * len(attention.pictures())


def test_a_selection_text_is_measured_besides(data, tokenizer, make_config, tmp_path):
    plain = train(make_config(), data, tokenizer, tmp_path / "a")
    both = train(make_config(), data, tokenizer, tmp_path / "b", selection=data.train)
    assert plain.selection_bits_per_byte is None
    assert both.bits_per_byte == plain.bits_per_byte != both.selection_bits_per_byte
    assert both.weights == plain.weights


def test_a_checksum_sees_one_bit():
    weight = torch.zeros(4)
    changed = weight.clone()
    changed[3] = 1e-45
    sums = {checksum({"a": weight}), checksum({"a": changed}), checksum({"b": weight}), checksum({"a": weight[None]})}
    assert len(sums) == 4


@pytest.mark.parametrize("changes", [{"checkpoint_activations": True}, {"compile": "aot_eager"}])
def test_activation_checkpoints_and_compilation_change_no_result(data, tokenizer, make_config, tmp_path, changes):
    small = {"specs": ["mha"], "num_layers": 1, "steps": 2}
    plain = train(make_config(**small), data, tokenizer, tmp_path / "a")
    other = train(make_config(**small, **changes), data, tokenizer, tmp_path / "b")
    assert other.bits_per_byte == pytest.approx(plain.bits_per_byte, rel=1e-5)
    assert other.parameters == plain.parameters


def test_activation_checkpoints_and_compilation_reach_the_trainer(make_config, tmp_path):
    from headloom.train.trainer import training_arguments

    found = training_arguments(make_config(checkpoint_activations=True, compile="aot_eager"), str(tmp_path))
    assert found.activation_checkpointing and found.torch_compile_backend == "aot_eager" and found.torch_compile
    plain = training_arguments(make_config(), str(tmp_path))
    assert not plain.activation_checkpointing and not plain.torch_compile
