"""`headloom list`: the attention mechanisms there are."""

from __future__ import annotations

from headloom.cli.common import Json, console, ends_with_status, print_json


@ends_with_status
def list_mechanisms(as_json: Json = False) -> None:
    """List the attention mechanisms with title, paper and a line on each."""
    from headloom.attention import mechanisms

    found = mechanisms()
    if as_json:
        print_json(
            [
                {"name": name, "title": info.title, "paper": info.paper, "summary": info.summary}
                for name, info in found.items()
            ]
        )
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("name", "title", "paper", "in a line"):
        table.add_column(heading)
    for name, info in found.items():
        table.add_row(name, info.title, info.paper, info.summary)
    console().print(table)
