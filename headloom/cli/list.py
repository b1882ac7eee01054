"""`headloom list`: the attention mechanisms there are."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from headloom.cli.common import Json, console, ends_with_status, print_json


@ends_with_status
def list_mechanisms(
    costs: Annotated[
        bool,
        typer.Option(
            "--costs", help="Also measure cache, cost of scores, and whether a graft keeps the function (seconds)."
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/mechanisms.md, costs included.")] = False,
    as_json: Json = False,
) -> None:
    """List the attention mechanisms and schedules of layers: name, title, paper, and what they do in a line."""
    from headloom.core.errors import HeadloomError

    if markdown and as_json:
        raise HeadloomError("--markdown and --json cannot go together: give one")
    if markdown:
        from headloom.bench import catalogue
        from headloom.lab.variants import defaults

        typer.echo(catalogue.markdown(defaults().reference, defaults().options), nl=False)
    elif costs:
        _measured(as_json)
    else:
        _named(as_json)


def _named(as_json: bool) -> None:
    """What the source says; torch stays unimported."""
    from headloom.lab.names import LINES, described

    mechanisms, schedules = described()
    if as_json:
        print_json(mechanisms)
        return
    _table(("name", "title", "paper", "in a line"), [[lines[key] for key in LINES] for lines in mechanisms])
    _schedules(schedules)
    console().print("\nheadloom list --costs measures cache, scores and grafts.", markup=False, soft_wrap=True)


def _measured(as_json: bool) -> None:
    from headloom.bench import catalogue
    from headloom.lab.names import described
    from headloom.lab.variants import defaults

    usual = defaults()
    found = catalogue.entries(usual.reference, usual.options)
    if as_json:
        print_json([{**dataclasses.asdict(entry), "cache": entry.cache, "flops": entry.flops} for entry in found])
        return
    _table(
        ("name", "title", "paper", "cache per token", "scores", "graft keeps", "in a line"),
        [
            [row.name, row.title, row.paper, row.cache, row.flops, "yes" if row.grafts else "no", row.summary]
            for row in found
        ],
    )
    sizes = ", ".join(f"{name}={value}" for name, value in catalogue.SIZES.items() if name != "rope_theta")
    console().print(
        f"\ncache: numbers a token; scores: FLOPs between tokens, in those of {usual.reference}; both at {sizes}, "
        f"{catalogue.TOKENS:,} tokens. graft keeps: it starts as the function that was there.",
        markup=False,
        soft_wrap=True,
    )
    _schedules(described()[1])


def _table(headings: tuple[str, ...], rows: list[list[str]]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading)
    for row in rows:
        table.add_row(*row)
    console().print(table)


def _schedules(schedules: list[dict[str, str]]) -> None:
    for lines in schedules:
        text = f"schedule {lines['name']}: {lines['summary']} ({lines['paper']})"
        console().print(text, markup=False, soft_wrap=True)
