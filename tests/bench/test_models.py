"""Whole training steps: the step trains, the twin is the same model, memory is counted, what does not fit is said."""

from __future__ import annotations

import pytest
import torch

import headloom as hl
from headloom.bench import models
from headloom.bench.cost import model_flops
from headloom.bench.memory import peak_bytes
from headloom.bench.models import Shape, optimizer_of, original_of, saved_bytes, steps, training_step
from headloom.bench.setting import Setting
from headloom.bench.subjects import Named
from headloom.hf import build_model

MHA, IHA = Named("mha", "mha", {}), Named("iha", "iha", {"pseudo_heads": 2})
ARGUMENTS = {"vocab_size": 37, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 24}
SHAPE = Shape("dwarf", 8, ARGUMENTS)
HOW = Setting(repeats=2, warmup=0)


def built(device=None, **changes):
    return build_model(("mha", {}), max_positions=8, device=device, **{**ARGUMENTS, **changes})


def test_a_step_lowers_the_loss_and_leaves_no_gradient():
    model, ids = built(), torch.randint(37, (2, 8))
    step = training_step(model, model, optimizer_of(model), ids, HOW)

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
    training_step(model, model, optimizer_of(model), torch.randint(37, (2, 8)), Setting(dtype="bfloat16"))()
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
    assert mha.bytes < iha.bytes and mha.held == 16 * mha.parameters
    groups = []
    real = models._timed

    def watched(group, *rest):
        groups.append([candidate.label for candidate in group])
        return real(group, *rest)

    monkeypatch.setattr(models, "_timed", watched)
    both = mha.held + iha.held + iha.during  # they take turns: one step at a time
    for available in (mha.bytes, both - 1, both):
        rows, skipped = steps([IHA, MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], available=available)
        if available == mha.bytes:
            assert [left["variant"] for left in skipped] == ["iha"]
            assert [(row["ratio"], row["ratio_to"]) for row in rows] == [(None, "iha")]
            assert skipped[0]["reason"] == "needs 0.0 GiB, 0.0 available"
        else:
            assert skipped == [] and [row["interleaved"] for row in rows] == [available == both] * 2
    assert groups == [["mha"], ["iha"], ["mha"], ["iha", "mha"]]


def test_what_no_machine_has_is_said_in_gib(monkeypatch):
    monkeypatch.setattr(models, "_free", lambda setting: 2**40)
    huge = Shape("huge", 8, {**ARGUMENTS, "hidden_size": 2**17, "intermediate_size": 2**18})
    rows, skipped = steps([MHA], [huge], HOW, tokens=[], batch_sizes=[1])
    assert rows == [] and skipped[0]["reason"].endswith(" GiB, 921.6 available")


@pytest.mark.parametrize("batch", [1, 4])
def test_what_is_said_to_be_needed_is_enough_and_not_twice_too_much(batch):
    """Weights, gradients, moments and what is saved for the backward pass, against what a step really allocates."""
    sizes = {"hidden_size": 64, "vocab_size": 101, "intermediate_size": 160}
    model, ids = built(**sizes), torch.randint(101, (batch, 64))
    parameters = sum(p.numel() for p in model.parameters())
    step = training_step(model, model, optimizer_of(model), ids, HOW)
    step()  # makes the moments
    taken = 12 * parameters + peak_bytes(step)
    said = 16 * parameters + batch * saved_bytes(built("meta", **sizes), 64)
    assert taken <= said <= 2 * taken


def test_compiled_steps():
    rows, _ = steps([MHA], [SHAPE], HOW, tokens=[], batch_sizes=[1], compile="eager")
    assert [row["compiled"] for row in rows] == [False, True]
    assert rows[1]["compile_seconds"] > 0 and "graph_breaks" in rows[1]
