"""One run: its numbers, its order, its groups, and its accumulation."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import headloom as hl
import headloom.train.run as run_module
import headloom.train.trainer as trainer_module
from headloom import hf
from headloom.core.errors import HeadloomError
from headloom.data.packing import TrainingRows
from headloom.evaluate import bits_per_byte
from headloom.ops.mixing import Mix
from headloom.records.metrics import read_metrics
from headloom.train.run import build, resolve, train

every_mechanism = pytest.mark.parametrize("mechanism", sorted(hl.mechanisms()))


def lines(folder, kind="train"):
    return [record for record in read_metrics(folder) if record.kind == kind]


def test_the_same_run_twice_is_bit_equal_whatever_the_caller_drew_before(run_tiny):
    first, one = run_tiny()
    torch.manual_seed(99)
    random.seed(99)
    np.random.seed(99)
    again, two = run_tiny()
    pick = [[(r.loss, r.grad_norm) for r in lines(folder)] for folder in (one, two)]
    assert pick[0] == pick[1]  # bit-equal, with attention dropout on
    assert first.bits_per_byte == again.bits_per_byte
    _, three = run_tiny(seed=1)
    assert pick[0] != [(r.loss, r.grad_norm) for r in lines(three)]


def test_the_callers_random_states_and_threads_are_left_alone(run_tiny):
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = torch.rand(1).item(), random.random(), np.random.rand()
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    run_tiny(threads=threads + 1, steps=1, warmup_steps=0)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == expected
    assert torch.get_num_threads() == threads


@every_mechanism
def test_a_real_model_trains_and_learns(run_tiny, mechanism):
    result, folder = run_tiny(make_model=build, steps=40, warmup_steps=4, specs=[mechanism], learning_rate=1e-2)
    losses = [record.loss for record in lines(folder)]
    assert losses[0] == pytest.approx(math.log(258), rel=0.05)
    assert losses[-1] < 0.8 * losses[0]
    assert result.bits_per_byte < 6.0
    assert result.bits_per_byte == pytest.approx(
        result.validation_loss * result.validation_tokens / result.validation_bytes / math.log(2)
    )
    assert result.perplexity == pytest.approx(math.exp(result.validation_loss))
    assert sum(result.score_paths.values()) > 0


def test_the_trainer_feeds_exactly_the_runs_order(run_tiny, data, make_config, monkeypatch):
    seen = []
    from headloom.train.trainer import RunTrainer

    plain = RunTrainer.training_step
    monkeypatch.setattr(
        RunTrainer,
        "training_step",
        lambda self, model, inputs, *rest: seen.append(inputs) or plain(self, model, inputs, *rest),
    )
    run = make_config(steps=150, seed=3)  # 600 rows: more than one epoch
    assert data.train.rows(16) < 600
    run_tiny(steps=150, seed=3)
    rows = TrainingRows(data.train, context=16, seed=3, count=600)
    assert torch.cat([batch["input_ids"] for batch in seen]).tolist() == [
        rows[i]["input_ids"].tolist() for i in range(600)
    ]
    assert len(seen) == run.steps and all(len(batch["input_ids"]) == 4 for batch in seen)


@every_mechanism
def test_accumulation_changes_neither_loss_nor_gradient(run_tiny, mechanism):
    records = {}
    for cuts in (1, 2, 4):
        result, folder = run_tiny(accumulation_steps=cuts, batch_size=8, steps=3, make_model=build, specs=[mechanism])
        records[cuts] = lines(folder)
        assert [record.tokens for record in records[cuts]] == [120, 240, 360] and result.tokens == 360
    for cuts in (2, 4):
        assert records[cuts][0].grad_norm / records[1][0].grad_norm == pytest.approx(1.0, rel=1e-4)
        assert records[cuts][-1].loss == pytest.approx(records[1][-1].loss, rel=1e-4)


@every_mechanism
def test_loss_is_the_mean_over_the_predicted_tokens(mechanism, run_tiny, data, make_config, tokenizer):
    _, folder = run_tiny(make_model=build, steps=1, warmup_steps=0, specs=[mechanism])
    run = resolve(make_config(steps=1, warmup_steps=0, specs=[mechanism]), data, tokenizer)
    rows = TrainingRows(data.train, context=16, seed=0, count=4)
    ids_BT = torch.stack([rows[i]["input_ids"] for i in range(4)])
    logits_BTV = build(run, tokenizer)(input_ids=ids_BT).logits
    expected = -logits_BTV[:, :-1].log_softmax(-1).gather(-1, ids_BT[:, 1:, None]).mean().item()
    assert lines(folder)[0].loss == pytest.approx(expected, rel=1e-5)


@every_mechanism
def test_no_decay_groups_reach_the_optimizer(mechanism, run_tiny, monkeypatch):
    made = []
    plain = torch.optim.AdamW

    def spy(groups, **options):
        made.append(plain(groups, **options))
        return made[-1]

    monkeypatch.setattr("headloom.train.trainer.torch.optim.AdamW", spy)
    held = []
    result, _ = run_tiny(
        make_model=lambda run, tok: held.append(build(run, tok)) or held[0], weight_decay=0.25, specs=[mechanism]
    )
    names = {id(p): name for name, p in held[0].named_parameters()}
    groups = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in made[0].param_groups}
    assert set(groups) == {0.25, 0.0}
    assert groups[0.0] == hf.no_decay_names(held[0])
    mixes = {f"{path}.weight" for path, module in held[0].named_modules() if isinstance(module, Mix)}
    vectors = {name for name, p in held[0].named_parameters() if p.ndim == 1}  # norms, biases, a mechanism's vectors
    assert mixes | vectors == groups[0.0]
    assert groups[0.0] | groups[0.25] == set(names.values())
    assert sum(len(group["params"]) for group in made[0].param_groups) == len(names)
    spared = [p.numel() for name, p in held[0].named_parameters() if name in groups[0.0]]
    assert result.no_decay_parameters == sum(spared) >= 5 * 16
    assert result.parameters == sum(p.numel() for p in held[0].parameters())
    assert (made[0].defaults["betas"], made[0].defaults["eps"]) == ((0.9, 0.95), 1e-8)


def test_decay_acts_only_on_the_decayed_group(run_tiny, tokenizer):
    held = []

    def frozen_gradient(run, tok):  # all gradients zero: what moves is moved by weight decay
        model = build(run, tok)
        for parameter in model.parameters():
            parameter.register_hook(torch.zeros_like)
        held.append((model, {name: p.detach().clone() for name, p in model.named_parameters()}))
        return model

    run_tiny(
        make_model=frozen_gradient, weight_decay=0.5, learning_rate=0.1, steps=2, warmup_steps=0, final_learning_rate=1
    )
    model, before = held[0]
    for name, parameter in model.named_parameters():
        factor = 1.0 if parameter.ndim < 2 else 0.95**2
        torch.testing.assert_close(parameter.detach(), before[name] * factor, rtol=1e-5, atol=1e-7)


def test_learning_rates_are_the_schedules_and_gradients_are_clipped(run_tiny):
    held = []
    _, folder = run_tiny(
        steps=6,
        warmup_steps=2,
        learning_rate=0.01,
        make_model=lambda run, tok: held.append(build(run, tok)) or held[-1],
    )
    rates = [record.learning_rate for record in lines(folder)]
    assert rates[:2] == pytest.approx([0.005, 0.01]) and rates[-1] == pytest.approx(0.001)
    assert rates[3] == pytest.approx(0.01 * 0.55)  # half way from 1 to 0.1


def test_clip_bounds_the_step_and_the_norm_is_that_before_clipping(run_tiny, monkeypatch):
    seen = []
    plain = torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda p, norm, **k: seen.append(norm) or plain(p, norm, **k))
    _, folder = run_tiny(clip=0.01, steps=2)
    assert seen == [0.01, 0.01]
    assert all(record.grad_norm > 0.05 for record in lines(folder))


@pytest.mark.parametrize("part", [None, 200])
def test_evaluations_along_the_way_are_written_and_change_nothing(tmp_path, data, tokenizer, make_config, part):
    """Bit for bit, with dropout drawn from the random state, and with a last row shorter than the others."""
    whole = data.validation
    short = whole if part is None else dataclasses.replace(whole, ids=whole.ids[: part + 1], bytes=part)
    data = dataclasses.replace(data, leading=short)
    run = make_config(specs=[("iha", {"pseudo_heads": 2, "dropout": 0.1})], steps=7, evaluations=3)
    result = train(run, data, tokenizer, tmp_path / "with")
    plain = train(make_config(**{**run.model_dump(), "evaluations": 0}), data, tokenizer, tmp_path / "without")
    assert result.weights == plain.weights and result.bits_per_byte == plain.bits_per_byte
    with_them, without = (
        [line.model_copy(update={"seconds": 0.0}) for line in lines(tmp_path / name)] for name in ("with", "without")
    )
    assert with_them == without and len(without) == 7

    points = lines(tmp_path / "with", "curve")
    assert [point.step for point in points] == [2, 4, 6, 7]  # quarters of 7 steps, upwards
    assert [point.tokens for point in points] == [step * 4 * 15 for step in (2, 4, 6, 7)]
    assert len({point.bits_per_byte for point in points}) == 4
    assert [(p.step, p.seconds, p.bits_per_byte) for p in result.curve] == [
        (p.step, p.seconds, p.bits_per_byte) for p in points
    ]
    assert f"({part or whole.bytes:,} bytes)" in result.curve_text
    assert (points[-1].bits_per_byte == result.bits_per_byte) == (part is None)
    assert [point.step for point in lines(tmp_path / "with", "eval")] == [7]
    assert plain.curve == () and plain.curve_text == "" and lines(tmp_path / "without", "curve") == []
    assert json.loads((tmp_path / "with" / "config.json").read_text())["evaluation_bytes"] == short.bytes
    with pytest.raises(HeadloomError, match=r"evaluation_bytes 9, but its data .* on \d+ bytes"):
        resolve(run.model_copy(update={"evaluation_bytes": 9}), data, tokenizer)


@pytest.mark.parametrize(
    ("steps", "evaluations", "after"),
    [
        (300, 10, [28, 55, 82, 110, 137, 164, 191, 219, 246, 273, 300]),
        (3, 10, [1, 2, 3]),
        (9, 2, [3, 6, 9]),
        (9, 0, []),
    ],
)
def test_evaluations_are_spread_evenly_and_end_with_the_run(make_config, steps, evaluations, after):
    assert list(make_config(steps=steps, evaluations=evaluations).evaluation_steps) == after


def test_the_clock_leaves_out_validation_and_callbacks(run_tiny, monkeypatch):
    """On a clock that goes on by a second at every look, by 100 in a validation and by 1000 in a callback."""
    now = 0.0

    def passes(seconds):
        nonlocal now
        now += seconds
        return now

    def slow_measure(*args, **kwargs):
        passes(100.0)
        return bits_per_byte(*args, **kwargs)

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=lambda: passes(1.0)))
    monkeypatch.setattr(run_module, "bits_per_byte", slow_measure)
    result, folder = run_tiny(evaluations=3, steps=8, on_progress=lambda *_: passes(1000.0))
    assert (result.train_seconds, result.eval_seconds) == (8.0, 101.0)
    assert [record.seconds for record in lines(folder)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert result.step_time_low <= result.step_time_seconds <= result.step_time_high
    assert result.tokens_per_second == pytest.approx(4 * 15 / result.step_time_seconds)
    assert result.warm_steps == 4


def test_progress_is_reported_each_step(run_tiny, capfd):
    calls = []
    _, folder = run_tiny(on_progress=lambda *call: calls.append(call), steps=3)
    assert calls == [(record.step, 3, record.loss) for record in lines(folder)]
    out, err = capfd.readouterr()
    assert out == "" and err == ""  # no bars and no printed logs of the Trainer's


def test_bfloat16_runs_and_is_recorded(run_tiny):
    half, one = run_tiny(dtype="bfloat16", make_model=build)
    full, two = run_tiny(make_model=build)
    assert lines(one)[0].loss != lines(two)[0].loss  # training itself runs in bfloat16, not only validation
    assert lines(one)[0].loss == pytest.approx(lines(two)[0].loss, rel=0.02)
    assert half.bits_per_byte != full.bits_per_byte
    assert half.bits_per_byte == pytest.approx(full.bits_per_byte, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 300}, "vocab_size 300, its data 258, the tokenizer 258"),
        ({"fingerprint": "0" * 64}, "was made for data 000000000000"),
        ({"tokens": 100_000}, "do not fill one row of 100000"),
    ],
)
def test_a_run_that_does_not_fit_its_data_is_refused_before_any_work(run_tiny, tmp_path, changes, words):
    with pytest.raises(HeadloomError, match=words):
        run_tiny(**changes)
    assert list(tmp_path.iterdir()) == []


def test_cuda_that_is_not_there_is_refused(run_tiny, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HeadloomError, match="torch sees none"):
        run_tiny(device="cuda")
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_mechanism_is_refused_before_the_folder_is_made(run_tiny, tmp_path):
    with pytest.raises(HeadloomError, match=r"unknown mechanism 'mhaa'\. Did you mean 'mha'"):
        run_tiny(make_model=build, specs=["mhaa"])
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_and_data_must_belong_together(data, make_config, tmp_path):
    from headloom.data.tokenizer import make_tokenizer

    other = make_tokenizer("bpe:259", ["aaaa aaaa"])
    with pytest.raises(HeadloomError, match="its data 258, the tokenizer 259"):
        train(make_config(), data, other, tmp_path / "run")
