"""Whole training steps: the step trains, the twin is the same model, memory is counted, what does not fit is said."""

from __future__ import annotations

import sys

import psutil
import pytest
import torch

import headloom as hl
from headloom.bench import models
from headloom.bench.asked import ModelSize, Named
from headloom.bench.memory import peak_bytes
from headloom.bench.models import optimizer_of, original_of, saved_bytes, steps, training_step
from headloom.bench.setting import Setting
from headloom.costs.count import model_flops
from headloom.hf import build_model

MHA, IHA = Named("mha", "mha", {}), Named("iha", "iha", {"pseudo_heads": 2})
ARGUMENTS = {"vocab_size": 37, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
SHAPE = ModelSize("dwarf", 8, ARGUMENTS)
HOW = Setting(repeats=2, warmup=0)


def built(device=None, **changes):
    return build_model(("mha", {}), max_positions=8, device=device, **{**ARGUMENTS, **changes})


def test_a_step_lowers_the_loss_and_leaves_no_gradient():
    model, ids = built(), torch.randint(37, (2, 8))
    step = training_step(model, optimizer=optimizer_of(model), batches=[{"input_ids": ids, "labels": ids}])

    def loss():
        return model(input_ids=ids, labels=ids).loss.item()

    before = loss()
    for _ in range(20):
        step()
    assert loss() < before - 0.01
    assert all(p.grad is None for p in model.parameters())


def test_bfloat16_keeps_the_weights_wide():
    model = built()
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    batch = dict.fromkeys(("input_ids", "labels"), torch.randint(37, (2, 8)))
    training_step(model, optimizer=optimizer_of(model), batches=[batch], dtype="bfloat16")()
    assert seen == [torch.bfloat16] and {p.dtype for p in model.parameters()} == {torch.float32}
    with pytest.raises(hl.HeadloomError, match="float32 or bfloat16, not float64"):
        steps([MHA], [SHAPE], Setting(dtype="float64"), tokens=[], batch_sizes=[1])


def test_the_transformers_own_model_is_the_same_function():
    model, ids = built(), torch.randint(37, (2, 8))
    twin = original_of(model)
    assert type(twin).__name__ == "LlamaForCausalLM"
    assert type(twin.model.layers[0].self_attn).__module__.startswith("transformers.")
    assert torch.allclose(twin(input_ids=ids).logits, model(input_ids=ids).logits, atol=1e-6)


def test_rows_of_steps():
    rows, skipped = steps([MHA, IHA], [SHAPE], HOW, tokens=[], batch_sizes=[1, 3], original=True)
    assert skipped == []
    assert [(row["variant"], row["batch_size"]) for row in rows] == [
        (name, batch) for batch in (1, 3) for name in ("mha", "iha", "LlamaForCausalLM")
    ]
    flops = {name: 3 * 3 * model_flops(built("meta"), 8, name) for name in ("full", "exact")}
    for row in (rows[3], rows[5]):
        assert {name: row[f"flops_{name}"] for name in flops} == flops
        assert row["parameters"] == sum(p.numel() for p in built().parameters())
    assert all(row["tokens"] == 8 and row["interleaved"] and row["ratio_to"] == "mha" for row in rows)
    assert rows[0]["paths"] == {"fused": 2} and rows[2]["paths"] == {}
    assert rows[3]["tokens_per_second"] == pytest.approx(24 / rows[3]["seconds"]["median"])


def test_beside_another_attention_the_originals_flops_are_not_claimed():
    rows, _ = steps([IHA], [SHAPE], HOW, tokens=[4], batch_sizes=[1], original=True)
    assert rows[0]["flops_exact"] > 0 and rows[1]["flops_exact"] is None


def test_what_does_not_fit_is_left_out_and_what_fits_alone_runs_alone(monkeypatch):
    mha, iha = models._candidates([MHA, IHA], SHAPE, 8, 1, False)
    assert mha.bytes("step") < iha.bytes("step") and mha.held("step") == 16 * mha.parameters
    groups = []
    real = models._timed

    def watched(group, *rest, **options):
        groups.append([candidate.label for candidate in group])
        return real(group, *rest, **options)

    monkeypatch.setattr(models, "_timed", watched)
    both = mha.held("step") + iha.bytes("step")  # they take turns: one step at a time
    for available in (mha.bytes("step"), both - 1, both):
        rows, skipped = steps([IHA, MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], available=available)
        if available == mha.bytes("step"):
            assert [left["variant"] for left in skipped] == ["iha"]
            assert [(row["ratio"], row["ratio_to"]) for row in rows] == [(None, "iha")]
            assert skipped[0]["reason"] == "needs 0.0 GiB, 0.0 available"
        else:
            assert skipped == [] and [row["interleaved"] for row in rows] == [available == both] * 2
    assert groups == [["mha"], ["iha"], ["mha"], ["iha", "mha"]]


def test_a_model_that_no_longer_fits_is_left_out(monkeypatch):
    """What the models before it have kept is not there for the next."""
    iha, mha = (models._candidates([each], SHAPE, SHAPE.tokens, 1, False)[0] for each in (IHA, MHA))
    enough = -int(-iha.bytes("step") // models.ROOM)
    free = [enough, enough, enough, enough, mha.bytes("step")]  # two looked at, whether together, the first, the second
    monkeypatch.setattr(models, "_free", lambda setting: free.pop(0))
    rows, skipped = steps([MHA, IHA], [SHAPE], HOW, tokens=[], batch_sizes=[1])
    assert free == [] and [row["variant"] for row in rows] == ["mha"]
    assert [row["variant"] for row in skipped] == ["iha"]


def test_what_no_machine_has_is_said_in_gib(monkeypatch):
    monkeypatch.setattr(models, "_free", lambda setting: 2**40)
    huge = ModelSize("huge", 8, {**ARGUMENTS, "hidden_size": 2**17, "intermediate_size": 2**18})
    rows, skipped = steps([MHA], [huge], HOW, tokens=[], batch_sizes=[1])
    assert rows == [] and skipped[0]["reason"].endswith(f" GiB, {1024 * models.ROOM:.1f} available")


@pytest.mark.skipif(sys.platform != "linux", reason="other allocators cannot be asked to give memory back")
def test_the_memory_of_a_size_is_given_back_for_the_next():
    steps([MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1])
    process = psutil.Process()
    before = process.memory_info().rss
    wide = ModelSize("wide", 8, {**ARGUMENTS, "hidden_size": 384, "num_layers": 8, "intermediate_size": 1024})
    ((row,), _) = steps([MHA], [wide], HOW, tokens=[], batch_sizes=[1])
    assert process.memory_info().rss - before < 16 * row["parameters"] / 4


@pytest.mark.parametrize("batch", [1, 4])
def test_what_is_said_to_be_needed_is_enough_and_not_twice_too_much(batch):
    """Weights, gradients, moments and what is saved for the backward pass, against what a step really allocates."""
    sizes = {"hidden_size": 64, "vocab_size": 101, "intermediate_size": 160}
    model, ids = built(**sizes), torch.randint(101, (batch, 64))
    parameters = sum(p.numel() for p in model.parameters())
    step = training_step(model, optimizer=optimizer_of(model), batches=[{"input_ids": ids, "labels": ids}])
    step()  # makes the moments
    taken = 12 * parameters + peak_bytes(step)
    said = 16 * parameters + batch * saved_bytes(built("meta", **sizes), 64)
    assert taken <= said <= 2 * taken


def test_compiled_steps():
    rows, _ = steps([MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], compile="eager")
    assert [row["compiled"] for row in rows] == [False, True]
    assert rows[1]["compile_seconds"] > 0 and "graph_breaks" in rows[1]


def test_both_passes_alone_need_half_the_memory_and_leave_the_weights():
    (mha,) = models._candidates([MHA], SHAPE, 8, 1, False)
    assert mha.bytes("backward") == 8 * mha.parameters + mha.saved < mha.bytes("step")
    rows, skipped = steps(
        [MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], modes=["backward", "step"], available=mha.bytes("backward")
    )
    assert [row["mode"] for row in rows] == ["backward"] and [left["mode"] for left in skipped] == ["step"]
    assert rows[0]["flops_exact"] == 3 * model_flops(built("meta"), 8, "exact")
    model, ids = built(), torch.randint(37, (2, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    grads = []
    model.lm_head.weight.register_hook(lambda grad: grads.append(grad.abs().sum()))
    training_step(model, optimizer=None, batches=[{"input_ids": ids, "labels": ids}])()
    assert len(grads) == 1 and grads[0] > 0 and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_training_loops_take_turns(monkeypatch):
    """Ours in the loop of `headloom train`, the transformers' own model in their Trainer."""
    from headloom.bench.pace import Pace

    ran = []

    def loop(name, *seconds):
        times = iter(seconds)
        return lambda self, model: ran.append((name, type(model).__name__, self.run.batch_size)) or next(times)

    monkeypatch.setattr(Pace, "ours", loop("ours", 2.0, 4.0))
    monkeypatch.setattr(Pace, "theirs", loop("theirs", 1.0, 4.0))
    rows, _ = steps([MHA], [SHAPE], HOW, tokens=[], batch_sizes=[3], modes=["train"], original=True)
    turn = [("ours", "HeadloomLlamaForCausalLM", 3), ("theirs", "LlamaForCausalLM", 3)]
    assert ran == turn * 2
    assert [row["seconds"]["median"] for row in rows] == [3.0, 2.5] and rows[1]["ratio"]["median"] == 0.75
    assert rows[0]["tokens_per_second"] == 8.0 and [row["mode"] for row in rows] == ["train"] * 2


def test_modes_that_are_not():
    with pytest.raises(hl.HeadloomError, match=r"unknown mode 'forward'.*Known: backward, step, train"):
        steps([MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], modes=["forward"])
    with pytest.raises(hl.HeadloomError, match="compile goes with backward and step"):
        steps([MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], modes=["train"], compile="eager")
