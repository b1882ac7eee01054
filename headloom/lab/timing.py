"""Step times that can be compared: every variant's real training step, taken in turns, before the runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headloom.lab.plan import Plan

REPEATS, WARMUP = 9, 2


def step_times(plan: Plan) -> dict[str, dict[str, Any]]:
    """Label -> median, low and high seconds of a training step over `repeats` interleaved repetitions.

    A step is the forward and backward pass of one batch, clipping and AdamW's update, with the run's own model,
    parameter groups, batch and threads.
    """
    import torch

    from headloom.bench.speed import interleaved

    threads = torch.get_num_threads()
    torch.set_num_threads(plan.spec.threads)
    try:
        steps = {variant.label: _training_step(plan, variant.label) for variant in plan.spec.variants}
        timings = interleaved(steps, repeats=REPEATS, warmup=WARMUP)
    finally:
        torch.set_num_threads(threads)
    return {
        label: {"median": timing.median, "low": timing.low, "high": timing.high, "repeats": REPEATS}
        for label, timing in timings.items()
    }


def _training_step(plan: Plan, label: str) -> Callable[[], object]:
    import torch

    from headloom.data import TrainingRows
    from headloom.hf import parameter_groups
    from headloom.train.run import build
    from headloom.train.trainer import collate

    run = plan.runs[label, plan.spec.seeds[0]]
    model: Any = build(run, plan.tokenizer)
    model.to(run.device).train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, run.weight_decay), lr=run.learning_rate, betas=run.betas, eps=run.adam_eps, fused=True
    )
    rows = TrainingRows(plan.data.train, context=run.tokens, seed=run.seed, count=run.batch_size)
    batch = {key: value.to(run.device) for key, value in collate([rows[i] for i in range(len(rows))]).items()}

    def step() -> None:
        model(**batch, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()

    return step
