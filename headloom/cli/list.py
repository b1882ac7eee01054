"""`headloom list`: the attention mechanisms there are."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import typer

from headloom.cli.common import Json, console, ends_with_status, print_json


@ends_with_status
def list_mechanisms(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/mechanisms.md.")] = False,
    as_json: Json = False,
) -> None:
    """List the attention mechanisms: title, paper, cache, cost of scores, and whether a graft keeps the function."""
    from headloom.attention.schedules import schedules
    from headloom.bench import catalogue
    from headloom.core.errors import HeadloomError
    from headloom.lab.variants import defaults

    if markdown and as_json:
        raise HeadloomError("--markdown and --json cannot go together: give one")
    usual = defaults()
    if markdown:
        typer.echo(catalogue.markdown(usual.reference, usual.options), nl=False)
        return
    found = catalogue.entries(usual.reference, usual.options)
    if as_json:
        print_json([{**dataclasses.asdict(entry), "cache": entry.cache, "flops": entry.flops} for entry in found])
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("name", "title", "paper", "cache per token", "scores", "graft keeps", "in a line"):
        table.add_column(heading)
    for entry in found:
        kept = "yes" if entry.grafts else "no"
        table.add_row(entry.name, entry.title, entry.paper, entry.cache, entry.flops, kept, entry.summary)
    out = console()
    out.print(table)
    sizes = ", ".join(f"{name}={value}" for name, value in catalogue.SIZES.items() if name != "rope_theta")
    out.print(
        f"\ncache: numbers a token; scores: FLOPs between tokens, in those of {usual.reference}; both at {sizes}, "
        f"{catalogue.TOKENS:,} tokens. graft keeps: it starts as the function that was there.",
        markup=False,
        soft_wrap=True,
    )
    for schedule in schedules().values():
        out.print(f"schedule {schedule.name}: {schedule.summary} ({schedule.paper})", markup=False, soft_wrap=True)
