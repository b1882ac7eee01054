"""`headloom study run|status|report|diff|list`: studies from files, or the ready ones by name."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from headloom.cli.common import (
    INTERRUPTED,
    RUN_FAILED,
    Json,
    console,
    ends_with_status,
    only_json_on_stdout,
    print_json,
)
from headloom.cli.compare import show_comparison, show_folder

app = typer.Typer(help="Studies: sets of runs that are compared under equal budgets.", no_args_is_help=True)

File = Annotated[
    str, typer.Argument(metavar="FILE", help="A study's YAML file, or the name of a ready study (study list).")
]
Folder = Annotated[Path, typer.Argument(help="A study's folder.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="A key of the study: steps=100, engine.workers=1, data=my_texts/. Repeatable."),
]
SizeOption = Annotated[
    str | None, typer.Option("--size", help="tiny, small, 125M, ...: use this size, and the study's settings for it.")
]


@app.command()
@ends_with_status
def run(
    study: File,
    size: SizeOption = None,
    settings: Settings = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the study. Default: the study's name here, or the next free number.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="local (one process per run), ray, or inline (no other process).")
    ] = None,
    address: Annotated[
        str | None, typer.Option(help="Address of the Ray cluster. Default: one on this machine.")
    ] = None,
    track: Annotated[str | None, typer.Option(help="tensorboard, trackio, or wandb (offline).")] = None,
    evaluations: Annotated[
        int | None,
        typer.Option(
            help="Validations during every run in addition to the one at its end; 0: none. Default: the study's, or 10."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a study. A stopped study continues when the same command is given again."""
    from headloom.lab.run.progress import Bar
    from headloom.lab.run.runner import Interrupted
    from headloom.lab.spec.study import WrittenStudy
    from headloom.lab.study import run_study

    given = {"engine.name": engine, "engine.address": address, "engine.track": track, "evaluations": evaluations}
    settings = [*(settings or []), *(f"{key}={value}" for key, value in given.items() if value is not None)]
    bar = Bar()
    with only_json_on_stdout(as_json) as stdout:
        written = WrittenStudy.from_yaml(study, size=size, settings=settings)
        words = ["headloom", "study", "run", study, *(["--size", size] if size else [])]
        words += [word for setting in settings for word in ("--set", setting)]
        try:
            found = run_study(written, command=shlex.join(words), out=out, progress=bar)
        except Interrupted as stopped:
            typer.echo(str(stopped), err=True)
            raise typer.Exit(INTERRUPTED) from None
        if as_json:
            print_json({"folder": str(found.folder), "report": str(found.report), **found.results}, stdout)
        else:
            show_comparison(found, bar.noted)
            console().print(found.record.summary, markup=False, soft_wrap=True)
    if found.failed:
        raise typer.Exit(RUN_FAILED)


@app.command()
@ends_with_status
def status(folder: Folder, as_json: Json = False) -> None:
    """Print how many runs of a study are finished, failed and waiting, and whether a process is working on it."""
    from headloom.lab.run.status import study_status

    found = study_status(folder)
    if as_json:
        print_json(found)
        return
    out = console()
    state = "running" if found["running"] else "not running"
    counts = ", ".join(f"{found['runs'][name]} {name}" for name in ("finished", "failed", "waiting"))
    out.print(
        f"{found['name']} ({found['hash']}): {counts} of {sum(found['runs'].values())} runs; {state}", markup=False
    )
    for failure in found["failures"]:
        out.print(f"{failure['variant']} seed {failure['seed']}: {failure['reason']}", markup=False, soft_wrap=True)
    out.print(f"to continue: {found['command']} --out {shlex.quote(str(folder))}", markup=False, soft_wrap=True)


@app.command()
@ends_with_status
def report(folder: Folder) -> None:
    """Write report.html and figures/ of a study's folder again, and print its table and findings."""
    from headloom.report.page import write_report

    page = write_report(folder)
    show_folder(folder)
    console().print(f"The page: {page}", markup=False, soft_wrap=True)


@app.command()
@ends_with_status
def diff(
    first: Annotated[str, typer.Argument(help="A study's folder, file or name; or FOLDER@VARIANT.")],
    second: Annotated[str, typer.Argument(help="Another one.")],
    size: SizeOption = None,
    as_json: Json = False,
) -> None:
    """Print the differences between two studies, or between two variants of studies."""
    from rich.table import Table

    from headloom.lab.run.status import study_differences

    found = study_differences(first, second, size=size)
    if as_json:
        print_json(found)
        return
    out = console()
    if not found:
        out.print("no difference")
        return
    table = Table(pad_edge=False)
    for heading in ("key", first, second):
        table.add_column(heading, overflow="fold")
    for key, values in found.items():
        table.add_row(key, *(_show(value) for value in values.values()))
    out.print(table)


@app.command("list")
@ends_with_status
def list_studies(as_json: Json = False) -> None:
    """List the ready studies."""
    from rich.table import Table

    from headloom.lab.spec.ready import read_study_file, ready_studies
    from headloom.lab.spec.study import WrittenStudy

    found = [WrittenStudy(**read_study_file(name)) for name in ready_studies()]
    if as_json:
        sizes = {s.name: [s.size, *s.sizes] for s in found}
        print_json([{"name": s.name, "title": s.title, "question": s.question, "sizes": sizes[s.name]} for s in found])
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("name", "question", "sizes"):
        table.add_column(heading)
    for study in found:
        table.add_row(study.name, study.question, ", ".join([study.size, *study.sizes]))
    out = console()
    out.print(table)
    out.print("\nheadloom study run NAME --size tiny", markup=False)


def _show(value: Any) -> str:
    return "none" if value is None else str(value)
