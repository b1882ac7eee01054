"""`headloom graft`: replace the attention of a checkpoint without changing what the model computes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headloom.cli.common import Json, ends_with_status, only_json_on_stdout, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headloom.hf import GraftReport

Model = Annotated[str, typer.Argument(help="A checkpoint's folder, a .gguf file, or the hub's owner/name.")]
Out = Annotated[Path, typer.Argument(help="A new folder for the result.")]
To = typer.Option("--to", help="The mechanism, with options after colons: iha:pseudo_heads=2.")
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="pseudo_heads=2: an option of the mechanism. Repeatable.")
]
Layers = Annotated[str | None, typer.Option(help="Which layers: 0-3,8. Default: all.")]
AllowChange = Annotated[bool, typer.Option("--allow-change", help="Accept a graft that changes the model's outputs.")]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16, float16 or float64.")]


@ends_with_status
def graft_command(
    model: Model,
    out: Out,
    to: Annotated[str, To],
    settings: Settings = None,
    layers: Layers = None,
    allow_change: AllowChange = False,
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Replace the attention of a checkpoint, and save the result with its tokenizer in a new folder.

    Unless --allow-change is given, the new model computes the same as the original; the difference is measured and
    printed.
    """
    from headloom.hf import places

    check_mechanism(to, settings or [], layers)
    places.check_checkpoint(model, dtype=dtype)
    with only_json_on_stdout(as_json) as stdout, places.place_for(out):
        mechanism, options = mechanism_of(to, settings or [])
        from headloom import hf
        from headloom.hf import checkpoints

        found = checkpoints.load_checkpoint(model, dtype=dtype)
        found.model = hf.graft(found.model, mechanism, layers=layers, allow_change=allow_change, **options)
        report = found.model.graft_report
        checkpoints.save_checkpoint(found, out)
        if as_json:
            print_json({"folder": str(out), **as_dict(report)}, stdout)
        else:
            typer.echo(report)
            typer.echo(saved(out, with_tokenizer=found.tokenizer is not None))


def check_mechanism(text: str, settings: Sequence[str], layers: str | None) -> None:
    """Raise HeadloomError for errors in --to, --set and --layers that can be found without torch."""
    from headloom.hf.places import read_layers
    from headloom.lab.spec.names import check_mechanism_name
    from headloom.lab.spec.options import split_pair
    from headloom.lab.spec.variants import split_variant

    check_mechanism_name(split_variant(text)[0], schedules=False)
    for setting in settings:
        split_pair(setting, "--set")
    if layers is not None:
        read_layers(layers)


def mechanism_of(text: str, settings: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The mechanism and its options from --to and --set (--set overrides --to). Options that are in neither have the
    values that comparisons use; these are printed on stderr. Raises HeadloomError for unknown names."""
    from headloom.lab.spec.names import check_mechanism_name
    from headloom.lab.spec.options import parse_options, split_pair
    from headloom.lab.spec.variants import parse_variant, split_variant, with_defaults

    name, _ = split_variant(text)
    check_mechanism_name(name, schedules=False)
    pairs = [split_pair(setting, "--set") for setting in settings]
    chosen = parse_options(name, [(key.removeprefix(f"{name}."), value) for key, value in pairs])
    found = with_defaults(parse_variant(text), chosen, of_size=True)
    for note in found.notes:
        typer.echo(note, err=True)
    return name, dict(found.options)


def as_dict(report: GraftReport) -> dict[str, Any]:
    """What `headloom graft --json` prints."""
    return {
        "layers": [
            {"layer": change.index, "mechanism": change.mechanism, "config": change.config.to_dict()}
            for change in report.changes
        ],
        "num_layers": report.num_layers,
        "parameters_before": report.parameters_before,
        "parameters_added": report.parameters_added,
        "difference": report.difference,
        "relative": report.relative,
        "exact": report.exact,
    }


def saved(out: Path, *, with_tokenizer: bool) -> str:
    """The last line of a command that saves a model."""
    return f"Saved in {out}" + ("" if with_tokenizer else " (no tokenizer: there was none beside the model)")
