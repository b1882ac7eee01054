"""`headloom finetune`: fine-tune a graft, and in the same way the model it was made from, on a text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headloom.cli.common import (
    DATA_KINDS,
    INTERRUPTED,
    Json,
    TextColumn,
    console,
    ends_with_status,
    only_json_on_stdout,
    print_json,
)
from headloom.cli.graft import AllowChange, Layers, Model, Settings, To, check_mechanism, mechanism_of
from headloom.cli.groups import MACHINE, MODEL, TEXT, TRAINING, WHAT, in_panels
from headloom.core.errors import HeadloomError
from headloom.core.heap import keep_freed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headloom.records.tuning import TuningResult
    from headloom.train.config import Arm

GRAFTED, UNGRAFTED = "grafted", "ungrafted"
PANELS = {
    WHAT: "to settings layers allow_change original only_grafted seeds",
    MODEL: "tokens",
    TEXT: "data text_column limit_bytes validation_bytes",
    TRAINING: "steps batch_size accumulation_steps learning_rate mix_learning_rate",
    MACHINE: "threads dtype out as_json",
}


@ends_with_status
@in_panels(PANELS)
def finetune(
    model: Model,
    data: Annotated[str, typer.Option(help=f"stdlib, {DATA_KINDS}.")],
    out: Annotated[Path, typer.Option(help="A new folder, or the folder of this same command, to continue it.")],
    to: Annotated[str | None, To] = None,
    settings: Settings = None,
    layers: Layers = None,
    allow_change: AllowChange = False,
    original: Annotated[
        str | None, typer.Option(help="If MODEL is already a graft: the model without a graft to compare it with.")
    ] = None,
    only_grafted: Annotated[
        bool, typer.Option("--only-grafted", help="Train the graft only, and compare nothing.")
    ] = False,
    steps: Annotated[int, typer.Option(help="Training steps of every run.")] = 200,
    tokens: Annotated[int, typer.Option(help="Context in tokens.")] = 512,
    batch_size: Annotated[int, typer.Option(help="Sequences per training step.")] = 4,
    accumulation_steps: Annotated[int, typer.Option(help="Split a step into this many passes, to save memory.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate, reached after 10 % of the steps.")] = 1e-4,
    mix_learning_rate: Annotated[
        float | None, typer.Option(help="Peak learning rate of the parameters that the graft adds. Default: the same.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs of each model; the seed sets the order of the data.")] = 1,
    validation_bytes: Annotated[int, typer.Option(help="Bytes of held-out text, at most.")] = 2**16,
    text_column: TextColumn = None,
    limit_bytes: Annotated[int | None, typer.Option(help="Bytes of text to read, at most.")] = None,
    threads: Annotated[int | None, typer.Option(help="Processor threads. Default: all that are available.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 (autocast over float32 weights).")] = "float32",
    as_json: Json = False,
) -> None:
    """Fine-tune a causal language model with another attention, and the model without it in the same way.

    Both see the same sequences in the same order, with the same steps, learning rates and seeds. Bits per byte are
    measured on held-out text: 10 % of the documents, or the last 10 % of a single document. Both tuned models and
    result.json are written to the folder.
    """
    from headloom.core.locks import LOCK
    from headloom.data.corpus import check_corpus, load_corpus
    from headloom.hf.places import new_folder
    from headloom.lab.run.progress import Bar
    from headloom.records.tuning import ASKED
    from headloom.train.config import Arm, fine_tunings

    recipe: dict[str, Any] = {
        "steps": steps,
        "tokens": tokens,
        "batch_size": batch_size,
        "accumulation_steps": accumulation_steps,
        "learning_rate": learning_rate,
        "mix_learning_rate": mix_learning_rate,
        "warmup_steps": steps // 10,
        "threads": threads,
        "dtype": dtype,
    }
    fine_tunings({GRAFTED: Arm(model)}, seeds, **recipe)
    if validation_bytes < 1:
        raise HeadloomError(f"validation_bytes must be at least 1, not {validation_bytes}")
    check_corpus(data, limit_bytes=limit_bytes, text_column=text_column)
    if out.exists() and not ASKED.is_in(out):
        new_folder(out, besides=LOCK)
    arms = arms_of(model, to, settings or [], layers, allow_change, original, only_grafted)
    from headloom.train.finetune import finetune as run

    keep_freed()
    with only_json_on_stdout(as_json) as stdout:
        try:
            with Bar() as bar:
                found = run(
                    arms,
                    load_corpus(data, limit_bytes=limit_bytes, text_column=text_column),
                    out,
                    seeds=seeds,
                    validation_bytes=validation_bytes,
                    progress=bar,
                    **recipe,
                )
        except KeyboardInterrupt:
            typer.echo(f"stopped; the finished part is kept in {out}: give the same command to continue", err=True)
            raise typer.Exit(INTERRUPTED) from None
        if as_json:
            print_json({"folder": str(out), **found.to_dict()}, stdout)
        else:
            _show(found, out, bar.noted)


def arms_of(
    model: str,
    to: str | None,
    settings: list[str],
    layers: str | None,
    allow_change: bool,
    original: str | None,
    only_grafted: bool,
) -> dict[str, Arm]:
    """The models to train. If MODEL is already a graft, it is compared with `original`; any other model is grafted here
    and compared with itself."""
    from headloom.hf.places import is_graft
    from headloom.train.config import Arm, GraftSpec

    if to is not None:
        check_mechanism(to, settings, layers)
    if only_grafted and original is not None:
        raise HeadloomError("--original and --only-grafted cannot go together: give one")
    if original is not None and is_graft(original):
        raise HeadloomError(f"--original '{original}' is a graft itself: give the model without one")
    if is_graft(model):
        if to is not None:
            raise HeadloomError(f"'{model}' is already a graft: leave --to out, or give the original model and --to")
        if original is None and not only_grafted:
            raise HeadloomError(
                f"'{model}' is already a graft, and the model it was made from is not known: give --original MODEL to "
                "compare with, or --only-grafted to train it alone"
            )
        return {GRAFTED: Arm(model), **({} if original is None else {UNGRAFTED: Arm(original)})}
    if to is None:
        raise HeadloomError(f"'{model}' is not a graft: name the attention it should get with --to")
    if original is not None:
        raise HeadloomError(f"--original is for a model that is already a graft, and '{model}' is not: leave it out")
    mechanism, options = mechanism_of(to, settings)
    spec = GraftSpec(mechanism=mechanism, options=options, layers=layers, allow_change=allow_change)
    return {GRAFTED: Arm(model, spec), **({} if only_grafted else {UNGRAFTED: Arm(model)})}


def _show(found: TuningResult, out: Path, noted: Sequence[str]) -> None:
    """Print the table, the difference and the folder of the models. noted: notes that were printed before."""
    from rich.table import Table

    from headloom.lab.results.statistics import mean_and_sd, paired_difference

    screen = console()
    table = Table(pad_edge=False)
    for place, name in enumerate(("model", "parameters", "before", "after", "change", "s / step", "training s")):
        table.add_column(name, justify="left" if place == 0 else "right")
    for name, arm in found.arms.items():
        after, before = mean_and_sd([run.bits_per_byte for run in arm.runs]), arm.before
        noise = "" if after.sd is None else f" (sd {after.sd:.4f})"
        table.add_row(
            name,
            f"{before.parameters:,}",
            f"{before.bits_per_byte:.4f}",
            f"{after.mean:.4f}{noise}",
            f"{(after.mean or 0) - before.bits_per_byte:+.4f}",
            f"{mean_and_sd([run.step_time_seconds for run in arm.runs]).mean:.2f}",
            f"{sum(run.train_seconds for run in arm.runs):.0f}",
        )
    screen.print(table)
    notes = [note for note in found.notes if note not in noted]
    for line in (next(iter(found.arms.values())).before.text, *notes):
        screen.print(line, markup=False, soft_wrap=True)
    for arm in found.arms.values():
        if arm.before.graft:
            screen.print(arm.before.graft, markup=False, soft_wrap=True)
    if set(found.arms) == {GRAFTED, UNGRAFTED}:
        by_seed = {name: {run.seed: run.bits_per_byte for run in arm.runs} for name, arm in found.arms.items()}
        paired = paired_difference(by_seed[GRAFTED], by_seed[UNGRAFTED])
        noise = (
            "one seed: the noise is not known"
            if paired.half_width is None
            else f"95 % interval {paired.low:+.4f} to {paired.high:+.4f}, {paired.n} seeds"
        )
        screen.print(
            f"grafted minus ungrafted: {paired.mean:+.4f} bits per byte ({noise})", markup=False, soft_wrap=True
        )
    screen.print(f"Models and result.json: {out}", markup=False, soft_wrap=True)
