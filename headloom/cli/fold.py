"""`headloom fold`: turn a graft into an ordinary checkpoint, where plain weights can compute the same."""

from __future__ import annotations

import dataclasses

import typer

from headloom.cli.common import Json, ends_with_status, only_json_on_stdout, print_json
from headloom.cli.graft import Dtype, Model, Out, saved


@ends_with_status
def fold_command(model: Model, out: Out, dtype: Dtype = "auto", as_json: Json = False) -> None:
    """Merge a graft's mixes into its projections. The result is a checkpoint of the original family without headloom.

    Where plain weights cannot compute the same, the command refuses and gives the reason.
    """
    from headloom.core.errors import HeadloomError
    from headloom.hf import places

    if not places.is_graft(model):
        raise HeadloomError(f"only a grafted model can be folded, and '{model}' is not one")
    places.check_checkpoint(model, dtype=dtype)
    with only_json_on_stdout(as_json) as stdout, places.place_for(out):
        from headloom import hf
        from headloom.hf import checkpoints

        found = checkpoints.load_checkpoint(model, dtype=dtype)
        found.model = hf.fold(found.model)
        report = found.model.fold_report
        checkpoints.save_checkpoint(found, out)
        if as_json:
            print_json({"folder": str(out), **dataclasses.asdict(report)}, stdout)
        else:
            typer.echo(report)
            typer.echo(saved(out, with_tokenizer=found.tokenizer is not None))
