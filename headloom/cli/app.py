"""The command line: `headloom compare`, `study`, `train`, `list`, `cost`, `bench`, and for checkpoints `graft`, `fold`,
`generate`, `finetune`.

Exit status: 0 done, 1 a run failed, 2 the call was wrong, 130 interrupted, 143 ended by SIGTERM.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from headloom.cli.bench import bench
from headloom.cli.compare import compare
from headloom.cli.cost import cost
from headloom.cli.finetune import finetune
from headloom.cli.fold import fold_command
from headloom.cli.generate import generate_command
from headloom.cli.graft import graft_command
from headloom.cli.list import list_mechanisms
from headloom.cli.study import app as study
from headloom.cli.train import train
from headloom.core.waiting import wait_briefly

app = typer.Typer(
    name="headloom",
    help="More attention heads from the same parameters, and an honest account of whether they paid.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("compare")(compare)
app.command("list")(list_mechanisms)
app.command("cost")(cost)
app.add_typer(bench, name="bench")
app.command("graft")(graft_command)
app.command("fold")(fold_command)
app.command("generate")(generate_command)
app.command("finetune")(finetune)
app.command("train")(train)
app.add_typer(study, name="study")


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import PackageNotFoundError, version

        try:
            typer.echo(f"headloom {version('headloom')}")
        except PackageNotFoundError:
            typer.echo("headloom (run from source, not installed)")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """The `headloom` entry point."""
    wait_briefly(os.environ)  # torch is not imported yet
    app()
