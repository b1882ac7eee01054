"""`headloom compare`: which attention is better on this text, at equal parameters, and by how much more than noise."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from headloom.cli.common import (
    DATA_KINDS,
    INTERRUPTED,
    RUN_FAILED,
    console,
    ends_with_status,
    only_json_on_stdout,
    print_json,
)
from headloom.cli.groups import MACHINE, MODEL, TEXT, TRAINING, WHAT, in_panels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from headloom.lab.results.comparison import Comparison
    from headloom.report.tables import Row

WIDE = 195
PANELS = {
    WHAT: "variants settings seeds",
    MODEL: "size layers width heads config tokens",
    TEXT: "data text_column tokenizer",
    TRAINING: "steps batch_size learning_rate evaluations",
    MACHINE: "threads device dtype compiled track out as_json",
}


@ends_with_status
@in_panels(PANELS)
def compare(
    variants: Annotated[
        str | None,
        typer.Option(
            help="Names, each with options after colons: mha,iha:pseudo_heads=2:order=token,sas:base=mqa. "
            "headloom list has the names, headloom list NAME the options. Default: mha,gqa,iha,sas."
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="iha.pseudo_heads=2: an option for every variant of that name. Repeatable."),
    ] = None,
    seeds: Annotated[int, typer.Option(help="How many seeds every variant runs with.")] = 3,
    size: Annotated[
        str,
        typer.Option(help="tiny, small, 125M, 350M, 1.3B, 2.4B, 2.7B, 6.7B or 10.6B."),
    ] = "tiny",
    layers: Annotated[int | None, typer.Option(help="Layers. Default: the size's.")] = None,
    width: Annotated[int | None, typer.Option(help="Width D. Default: the size's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Heads H. Default: the size's.")] = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="A Hugging Face config of a decoder (a folder or a JSON file). Every variant is that model with "
            "another attention; options that a variant leaves out (key/value heads, windows) come from the config."
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option("--tokens", "--context", help="Context in tokens. Default: the size's."),
    ] = None,
    data: Annotated[str, typer.Option(help=f"stdlib (Python's own source), {DATA_KINDS}.")] = "stdlib",
    text_column: Annotated[
        str | None,
        typer.Option(help="The column with the text, in tables and data sets. Default: text."),
    ] = None,
    tokenizer: Annotated[
        str,
        typer.Option(help="bytes, bpe:4096, a folder with a saved tokenizer, or owner/name on the Hugging Face hub."),
    ] = "bytes",
    steps: Annotated[int | None, typer.Option(help="Training steps of every run. Default: the size's.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences per training step. Default: the size's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate. Default: the size's.")] = None,
    evaluations: Annotated[
        int,
        typer.Option(help="Validations during every run, for its curve, in addition to the one at its end; 0: none."),
    ] = 10,
    dtype: Annotated[str, typer.Option(help="float32, or bfloat16 (autocast over float32 weights).")] = "float32",
    threads: Annotated[
        int | None,
        typer.Option(help="Processor threads of a run. Default: the size's (tiny: 1), or all that are available."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto (CUDA where there is one), cpu or cuda.")] = "auto",
    compiled: Annotated[bool, typer.Option("--compile", help="Compile the models (torch.compile, inductor).")] = False,
    track: Annotated[str | None, typer.Option(help="tensorboard, trackio, or wandb (offline).")] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the study. Default: headloom-compare, or the next free number."),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Print the result as JSON on stdout, and nothing else."),
    ] = False,
) -> None:
    """Train attention variants on the same text at equal parameters and compare them.

    Writes a folder with every run, results.json, results.csv and report.html. A stopped comparison continues when the
    same command is given again.
    """
    from headloom.lab.compare import compare as run
    from headloom.lab.run.progress import Bar
    from headloom.lab.run.runner import Interrupted

    bar = Bar()
    with only_json_on_stdout(as_json) as stdout:
        try:
            comparison = run(
                variants,
                settings=settings or [],
                size=size,
                steps=steps,
                seeds=seeds,
                data=data,
                text_column=text_column,
                tokenizer=tokenizer,
                tokens=tokens,
                batch_size=batch_size,
                learning_rate=learning_rate,
                evaluations=evaluations,
                threads=threads,
                layers=layers,
                width=width,
                heads=heads,
                config=config,
                device=device,
                dtype=dtype,
                compile=compiled,
                track=track,
                out=out,
                progress=bar,
            )
        except Interrupted as stopped:
            typer.echo(str(stopped), err=True)
            raise typer.Exit(INTERRUPTED) from None
        if as_json:
            print_json(
                {"folder": str(comparison.folder), "report": str(comparison.report), **comparison.results}, stdout
            )
        else:
            show_comparison(comparison, bar.noted)
    if comparison.failed:
        raise typer.Exit(RUN_FAILED)


def show_comparison(comparison: Comparison, noted: Sequence[str] = ()) -> None:
    """Print the table, the findings and the path of the page. noted: notes that were printed before."""
    show_folder(comparison.folder, noted)
    console().print(f"The page: {comparison.report}", markup=False, soft_wrap=True)


def show_folder(folder: Path, noted: Sequence[str] = ()) -> None:
    """Print the table and the findings of a study's folder, without the notes in `noted`."""
    from headloom.records.reading import read_study
    from headloom.report import tables

    study = read_study(folder)
    out = console()
    rows = tables.rows(study)
    out.print(_table(tables.columns(study.results.reference), rows, wide=out.width >= WIDE))
    for row in rows:
        if row.problem:
            out.print(f"{row.label}: {row.problem}", markup=False, soft_wrap=True)
    said = study.results
    notes = [note for note in said.notes if note not in noted]
    for line in (*notes, *said.warnings, *said.headlines):
        out.print(line, markup=False, soft_wrap=True)


def _table(columns: Sequence[str], rows: Sequence[Row], *, wide: bool) -> Table:
    """A table with one row per variant, or one column per variant if rows would be too long. Long text is wrapped."""
    from rich.table import Table
    from rich.text import Text

    from headloom.report import tables

    colours = {"better": "green", "worse": "red"}
    styles = [{tables.DIFFERENCE: colours.get(row.verdict, "")} for row in rows]
    lines = [
        [Text(cell, style=style.get(place, "")) for place, cell in enumerate(row.cells)]
        for row, style in zip(rows, styles, strict=True)
    ]
    table = Table(pad_edge=False)
    if not wide:
        heading, *rest = zip(map(Text, columns), *lines, strict=True)
        for text in heading:
            table.add_column(text, overflow="fold")
        for texts in rest:
            table.add_row(*texts)
        return table
    for place, name in enumerate(columns):
        justify: Literal["left", "right"] = "left" if place < 2 else "right"
        table.add_column(Text(_broken(name)), justify=justify, overflow="fold")
    for line in lines:
        table.add_row(*line)
    return table


def _broken(heading: str) -> str:
    """A heading broken into lines of two or three words, so that it does not widen its column."""
    return "\n".join(textwrap.wrap(heading, 14))
