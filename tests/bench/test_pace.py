"""Two training loops, timed: both train the same model on the same rows in the same way."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch.optim.optimizer import register_optimizer_step_pre_hook

from headloom import hf
from headloom.bench import pace
from headloom.bench.pace import TIMED, WARM, Pace
from headloom.data.packing import TrainingRows

STEPS = WARM + TIMED + 1


@pytest.fixture(scope="module")
def seen():
    """By loop: the weights before, every batch, and the optimizer's settings at the first step."""
    ours = hf.build_model(
        "mha", vocab_size=37, hidden_size=16, num_layers=2, num_heads=2, intermediate_size=24, max_positions=8
    )
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**ours.config.to_dict(), "model_type": "llama"}))
    theirs.load_state_dict(ours.state_dict())
    made = Pace(vocab_size=37, tokens=8, batch_size=3, threads=1, device="cpu", seed=5)
    found = {"pace": made}
    for name, model in (("ours", ours), ("theirs", theirs)):
        about = found[name] = {"weights": {k: v.clone() for k, v in model.state_dict().items()}, "ids": [], "steps": []}

        def before(module, args, given, about=about):
            if module.training:
                about["ids"].append(given["input_ids"])
                assert torch.equal(given["labels"], given["input_ids"])

        def stepped(optimizer, args, given, about=about):
            about["steps"].append([dict(group) for group in optimizer.param_groups])
            about["optimizer"] = type(optimizer)

        hooks = model.register_forward_pre_hook(before, with_kwargs=True), register_optimizer_step_pre_hook(stepped)
        about["seconds"] = getattr(made, name)(model)
        for hook in hooks:
            hook.remove()
    return found


def test_both_see_the_runs_rows_in_order_and_start_from_the_same_weights(seen):
    rows = TrainingRows(seen["pace"].data.train, context=8, seed=5, count=3 * STEPS)
    expected = torch.stack([rows[i]["input_ids"] for i in range(3 * STEPS)])
    for name in ("ours", "theirs"):
        assert len(seen[name]["ids"]) == STEPS
        assert torch.equal(torch.cat(seen[name]["ids"]), expected)
        assert seen[name]["seconds"] > 0
    ours, theirs = seen["ours"]["weights"], seen["theirs"]["weights"]
    assert list(ours) == list(theirs) and all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_both_update_by_the_same_optimizer(seen):
    groups = {}
    for name in ("ours", "theirs"):
        assert seen[name]["optimizer"] is torch.optim.AdamW and len(seen[name]["steps"]) == STEPS
        first = seen[name]["steps"][0]
        groups[name] = {
            group["weight_decay"]: (
                sorted(p.shape for p in group["params"]),
                group["betas"],
                group["eps"],
                group["fused"],
            )
            for group in first
        }
        assert set(groups[name]) == {0.0, 0.1}
    assert groups["ours"] == groups["theirs"]


def test_the_clock_runs_over_whole_steps_without_the_first_and_the_last(monkeypatch):
    """The first three steps and the last take 100 s, the ten between them 7 s each."""
    clock, now = pace._Clock(), 0.0
    monkeypatch.setattr(pace.time, "perf_counter", lambda: now)
    for step in range(1, STEPS + 1):
        now += 7.0 if 3 < step <= 13 else 100.0
        clock.ended(step)
    assert STEPS == 14 and clock.seconds == 7.0
