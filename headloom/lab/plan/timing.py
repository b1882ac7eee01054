"""Equal time: every variant's real training step, taken in turns before the runs, and the number of steps each gets.

What was measured is frozen in study.json: a study that goes on, or is made again from that file, does not measure. One
that has grown measures the new variants only, in turns with one that was measured before, and gives their times in
that one's time of then: what else the machine does now is in neither.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError
from headloom.lab.plan.budget import Match, setting, with_knob
from headloom.lab.spec.resolved import FIELDS, BudgetSpec, Shape, StudySpec, Variant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from headloom.data.packing import TokenData
    from headloom.train.config import RunConfig

REPEATS, WARMUP = 9, 2
GUESSES = 4

Timing = dict[str, Any]
Measure = Callable[[Mapping[str, Shape]], dict[str, Timing]]


@dataclass(frozen=True)
class Measured:
    """By label: the step times, the shapes at equal time, and what the time budget came to where it has one."""

    timing: Mapping[str, Timing] = field(default_factory=dict)
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    matches: Mapping[str, Match] = field(default_factory=dict)


def step_times(
    runs: Mapping[str, RunConfig], data: TokenData, tokenizer: PreTrainedTokenizerFast, *, repeats: int = REPEATS
) -> dict[str, Timing]:
    """Label -> median, low and high (quartiles) seconds of a training step, and every sample: repetitions were taken in
    turns, so sample i of one label belongs to sample i of another.

    A step is the forward and backward pass of one batch in its accumulation steps, clipping and AdamW's update, with
    the run's own model, parameter groups, batch, threads, type, compilation and activation checkpoints.
    """
    import torch

    from headloom.bench.speed import interleaved

    threads = torch.get_num_threads()
    torch.set_num_threads(next(iter(runs.values())).threads or threads)
    try:
        steps = {label: step_of_run(run, data, tokenizer) for label, run in runs.items()}
        timings = interleaved(steps, repeats=repeats, warmup=WARMUP)
    finally:
        torch.set_num_threads(threads)
    return {
        label: {**timing.spread(), "repeats": repeats, "samples": list(timing.samples)}
        for label, timing in timings.items()
    }


def step_of_run(run: RunConfig, data: TokenData, tokenizer: PreTrainedTokenizerFast) -> Callable[[], object]:
    """One training step of a run, to be called again and again."""
    import torch

    from headloom.bench import models
    from headloom.data.packing import TrainingRows
    from headloom.hf import parameter_groups
    from headloom.train.run import build
    from headloom.train.trainer import adamw, collate

    model: Any = build(run, tokenizer)
    device = run.device or "cpu"
    model.to(device).train()
    if run.checkpoint_activations:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = adamw(run, parameter_groups(model, run.weight_decay))
    rows = TrainingRows(data.train, context=run.tokens, seed=run.seed, count=run.batch_size)
    cuts = range(0, run.batch_size, run.micro_batch_size)
    batches = [
        {k: v.to(device) for k, v in collate([rows[i] for i in range(cut, cut + run.micro_batch_size)]).items()}
        for cut in cuts
    ]
    called = torch.compile(model, backend=run.compile) if run.compile else None
    return models.training_step(
        model, optimizer=optimizer, batches=batches, dtype=run.dtype, clip=run.clip, call=called
    )


def match_time(
    spec: StudySpec, shapes: Mapping[str, Shape], measure: Measure, known: Measured = Measured()
) -> Measured:
    """Shapes whose runs take equal time, every variant's step time, and what the budget came to.

    Knobs of the model are turned until a step takes as near as can be the target's; then all steps are measured
    together, and `steps`, if it is a knob, closes what is left. What is `known` is kept, and its variants are not
    matched again.

    Raises HeadloomError when the nearest reachable time is further from the target's than the tolerance.
    """
    budget = spec.budget("time")
    shapes = {**shapes, **known.shapes}
    new = [variant for variant in spec.variants if variant.label not in known.timing]
    if budget is not None:
        for variant in new:
            target = spec.target(budget, variant)
            for knob in budget.knobs_of(variant) if target else ():
                if knob != "steps":
                    assert target is not None
                    shapes[variant.label] = _grown(variant.label, knob, shapes, target, measure)
    timing = {**known.timing, **_timings(spec, shapes, new, measure, known.timing)}
    matches = dict(known.matches)
    if budget is not None:
        for variant in new:
            target = spec.target(budget, variant)
            if target is not None:
                seconds = shapes[target].steps * timing[target]["median"]
                shapes[variant.label], matches[variant.label] = _timed(
                    variant, budget, shapes[variant.label], timing[variant.label]["median"], seconds
                )
    return Measured(timing, shapes, matches)


def _timings(
    spec: StudySpec,
    shapes: Mapping[str, Shape],
    new: Sequence[Variant],
    measure: Measure,
    known: Mapping[str, Timing],
) -> dict[str, Timing]:
    """The step times of new variants; where some are known, each beside one of those, and in its time of then."""
    if not new:
        return {}
    budget, beside = spec.budget("time"), {}
    for variant in new:
        target = spec.target(budget, variant) if budget else None
        beside[variant.label] = next((o for o in (target, variant.against, spec.reference, *known) if o in known), None)
    labels = [v.label for v in spec.variants if v.label in beside or v.label in beside.values()]
    found = measure({label: shapes[label] for label in labels})
    times = {}
    for label, other in beside.items():
        times[label] = found[label]
        if other is not None:
            factor = known[other]["median"] / found[other]["median"]
            scaled = {key: factor * found[label][key] for key in ("median", "low", "high")}
            times[label] = {**found[label], **scaled, "beside": other}
            times[label]["samples"] = _in_its_samples(found[label], found[other], known[other])
    return times


def _in_its_samples(mine: Timing, now: Timing, then: Timing) -> list[float]:
    """Every repetition in the other's time of then, so that sample i still belongs to sample i of what was there,
    in the ratio that was measured. None at all where the other's samples of then are not known."""
    three = [timing.get("samples") or [] for timing in (mine, now, then)]
    alike = len({len(samples) for samples in three}) == 1
    return [a / b * c for a, b, c in zip(*three, strict=True)] if alike else []


def _timed(variant: Variant, budget: BudgetSpec, shape: Shape, step: float, seconds: float) -> tuple[Shape, Match]:
    knobs = budget.knobs_of(variant)
    if "steps" in knobs:
        shape = shape.model_copy(update={"steps": max(1, round(seconds / step))})
    met = Match("time", knobs, seconds, shape.steps * step)
    if abs(met.relative) > budget.tolerance:
        name = FIELDS[knobs[-1]][0]
        raise HeadloomError(
            f"{variant.label} cannot be matched to {seconds:.4g} seconds of training within {budget.tolerance:.1%}: "
            f"the nearest it reaches is {met.count:.4g} ({met.relative:+.1%}) at {name}={getattr(shape, name)}; "
            + ("give more steps" if "steps" in knobs else "let steps close the gap (knob: [..., steps])")
            + ", a wider tolerance, or leave it out"
        )
    return shape, met


def _grown(label: str, knob: str, shapes: Mapping[str, Shape], target: str, measure: Measure) -> Shape:
    """The shape with the knob where a step takes nearest to the target's: guessed from the line through what was
    measured, measured, and again, a few times."""
    before, goal = shapes[label], shapes[target]
    ratios: dict[int, float] = {}

    def ratio(value: int) -> float:
        if value not in ratios:
            found = measure({label: with_knob(before, knob, value), target: goal})
            # the target's whole time over this one's steps: what its step may take
            allowed = found[target]["median"] * (goal.steps / before.steps if goal.steps != before.steps else 1.0)
            ratios[value] = found[label]["median"] / allowed
        return ratios[value]

    value = setting(before, knob)
    ratio(value)
    guess = max(1, round(value / ratios[value]))
    for _ in range(GUESSES):
        guess = guess if guess not in ratios else _between(ratios)
        if guess in ratios:
            break
        try:
            ratio(guess)
        except HeadloomError:  # invalid size: try the next larger
            ratios[guess] = float("inf")
            guess += 1
            continue
        guess = _on_line(ratios)
    best = min(ratios, key=lambda v: (abs(ratios[v] - 1), v))
    return with_knob(before, knob, best)


def _on_line(ratios: Mapping[int, float]) -> int:
    """Where the line through the two values nearest to 1 meets 1."""
    (a, ya), (b, yb) = sorted(ratios.items(), key=lambda item: abs(item[1] - 1))[:2]
    if yb == ya or abs(yb) == float("inf"):
        return a
    return max(1, round(a + (1 - ya) * (b - a) / (yb - ya)))


def _between(ratios: Mapping[int, float]) -> int:
    """The neighbour of the best value on the side of 1, if it was not measured."""
    best = min(ratios, key=lambda v: (abs(ratios[v] - 1), v))
    return max(1, best + 1 if ratios[best] < 1 else best - 1)
