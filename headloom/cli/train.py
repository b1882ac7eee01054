"""`headloom train`: one run, from a file or from options."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headloom.cli.common import DATA_KINDS, Json, TextColumn, console, ends_with_status, only_json_on_stdout, print_json
from headloom.cli.groups import MACHINE, MODEL, TEXT, TRAINING, WHAT, in_panels
from headloom.core.errors import HeadloomError
from headloom.core.heap import keep_freed

if TYPE_CHECKING:
    from collections.abc import Callable

    from headloom.train.config import RunConfig
    from headloom.train.file import Text


PANELS = {
    WHAT: "variant",
    MODEL: "size",
    TEXT: "data text_column tokenizer",
    TRAINING: "steps learning_rate seed evaluations settings",
    MACHINE: "compiled checkpoint_activations track save_model out as_json",
}


@ends_with_status
@in_panels(PANELS)
def train(
    file: Annotated[Path | None, typer.Argument(help="A run's YAML file. Without it, the options are used.")] = None,
    variant: Annotated[str | None, typer.Option(help="For example iha:pseudo_heads=2. Default: mha.")] = None,
    size: Annotated[str | None, typer.Option(help="tiny, small, 125M, ... Default: tiny.")] = None,
    data: Annotated[str | None, typer.Option(help=f"stdlib, {DATA_KINDS}.")] = None,
    text_column: TextColumn = None,
    tokenizer: Annotated[str | None, typer.Option(help="bytes, bpe:4096, or a saved tokenizer's folder.")] = None,
    steps: Annotated[int | None, typer.Option(help="Default: the size's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak. Default: the size's.")] = None,
    seed: Annotated[int | None, typer.Option(help="Default: 0.")] = None,
    evaluations: Annotated[
        int | None,
        typer.Option(help="Validations during the run in addition to the one at its end; 0: none. Default: 10."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", help="A field of a run's file: batch_size=16. Repeatable.")
    ] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the model (torch.compile, inductor).")] = False,
    checkpoint_activations: Annotated[
        bool, typer.Option(help="Recompute activations in the backward pass: less memory, about a third more time.")
    ] = False,
    track: Annotated[str | None, typer.Option(help="tensorboard, trackio, or wandb (offline).")] = None,
    save_model: Annotated[bool, typer.Option(help="Also write model and tokenizer to OUT/model.")] = False,
    out: Annotated[Path, typer.Option(help="The run's folder.")] = Path("headloom-run"),
    as_json: Json = False,
) -> None:
    """Train one model and measure it. A stopped run continues from its last checkpoint when the same command is given.

    For several devices: accelerate launch -m headloom.train OUT/run.yaml --out DIR.
    """
    import yaml

    from headloom.lab.run.progress import Bar
    from headloom.train.file import check_run, train_text

    given: dict[str, Any] = {
        "data": data,
        "text_column": text_column,
        "tokenizer": tokenizer,
        "steps": steps,
        "seed": seed,
        "evaluations": evaluations,
    }
    given |= {"learning_rate": learning_rate, "compile": "inductor" if compiled else None}
    given |= {"checkpoint_activations": checkpoint_activations or None}
    given = {key: value for key, value in given.items() if value is not None}
    for setting in settings or []:
        key, equals, value = setting.partition("=")
        if not equals or not key.strip():
            raise HeadloomError(f"--set must look like key=value (for example batch_size=16), not '{setting}'")
        given[key.strip()] = yaml.safe_load(value)
    with only_json_on_stdout(as_json) as stdout:
        if file is not None and (variant or size):
            raise HeadloomError(
                "the file describes the whole model: leave out either --variant and --size, or the file"
            )
        if file:
            run, text = _changed(file, given)
        else:
            run, text = _from_options(
                variant or "", size or "tiny", given, lambda run, text: check_run(run, text, out, track=track)
            )
        keep_freed()
        with Bar() as bar:
            bar.start(1, run.steps, 0)
            bar.run(run.name, 1)
            result = train_text(
                run,
                text,
                out,
                lambda step, steps, loss: bar.step(1, step, loss),
                on_note=bar.note,
                track=track,
                save_model=save_model,
            )
        if as_json:
            print_json({"folder": str(out), **result.to_dict()}, stdout)
            return
        console().print(
            f"{run.name}: {result.bits_per_byte:.4f} bits per byte on {result.validation_bytes:,} bytes after "
            f"{run.steps:,} steps ({result.tokens:,} tokens, {result.train_seconds:.1f} s); "
            f"{result.parameters:,} parameters: {out}",
            markup=False,
            soft_wrap=True,
        )


def _changed(file: Path, given: dict[str, Any]) -> tuple[RunConfig, Text]:
    from headloom.lab.spec.names import check_mechanism_name
    from headloom.train.file import parse_run, read_mapping

    run, text = parse_run({**read_mapping(file), **given}, str(file))
    for spec in run.specs:
        check_mechanism_name(spec.mechanism, schedules=False)
    return run, text


def _from_options(
    variant: str, size_name: str, given: dict[str, Any], check: Callable[[RunConfig, Text], None]
) -> tuple[RunConfig, Text]:
    """The run of a variant at a size, changed by the given options. check: called before torch is imported, to refuse
    wrong values."""
    from headloom.lab.spec.sizes import get_size
    from headloom.lab.spec.variants import defaults, parse_variant, split_variant, with_defaults
    from headloom.train.file import parse_run

    size = get_size(size_name)
    text = variant or defaults().reference
    mechanism, _ = split_variant(text)
    tokens = given.get("tokens", size.tokens)
    steps = given.get("steps", size.steps)
    values = {
        "name": text,
        "specs": [mechanism],
        "hidden_size": size.hidden_size,
        "num_layers": size.num_layers,
        "num_heads": size.num_heads,
        "intermediate_size": size.intermediate_size,
        "tie_embeddings": size.tie_embeddings,
        "rope_theta": size.rope_theta,
        "tokens": tokens,
        "batch_size": size.batch_size,
        "steps": steps,
        "learning_rate": size.learning_rate,
        "warmup_steps": min(1000, steps // 10) if isinstance(steps, int) else 0,
        "validation_bytes": size.validation_bytes,
    }
    check(*parse_run({**values, **given}, "the options"))
    found = with_defaults(parse_variant(text), {})
    from headloom.mechanism.schedules import layers_of  # imports torch

    layers = layers_of(
        found.mechanism, found.options, num_layers=given.get("num_layers", size.num_layers), tokens=tokens
    )
    values |= {"name": found.text, "specs": layers[:1] if all(layer == layers[0] for layer in layers) else layers}
    return parse_run({**values, **given}, "the options")
