"""`headloom list`: the available attention mechanisms and their options."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated

import typer

from headloom.cli.common import Json, console, ends_with_status, print_json

if TYPE_CHECKING:
    from rich.table import Table

    from headloom.costs.options import Option


@ends_with_status
def list_mechanisms(
    name: Annotated[
        str | None, typer.Argument(help="A mechanism or schedule: print its options, their meaning and their cost.")
    ] = None,
    costs: Annotated[
        bool,
        typer.Option(
            "--costs", help="Also print cache, cost of scores, and whether a graft keeps the function (takes seconds)."
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/mechanisms.md, costs included.")] = False,
    as_json: Json = False,
) -> None:
    """List the attention mechanisms and layer schedules, or, with a name, all options of one.

    Each option is printed with its allowed values, its default, its meaning, and the cost of other values.
    """
    from headloom.core.errors import HeadloomError

    if name is not None and (markdown or costs):
        raise HeadloomError("--markdown and --costs show all mechanisms: leave out either them or the name")
    if name is not None:
        _options(name, as_json)
        return
    if markdown and as_json:
        raise HeadloomError("--markdown and --json cannot go together: give one")
    if markdown:
        from headloom.costs import catalogue, options
        from headloom.lab.spec.variants import defaults

        typer.echo(catalogue.markdown(defaults().reference, defaults().options), nl=False)
        typer.echo("\n" + options.markdown(), nl=False)
    elif costs:
        _measured(as_json)
    else:
        _named(as_json)


def _named(as_json: bool) -> None:
    """Print names and titles, read from the source so that torch is not imported."""
    from headloom.lab.spec.names import LINES, described

    mechanisms, schedules = described()
    if as_json:
        print_json(mechanisms)
        return
    _table(("name", "title", "paper", "in a line"), [[lines[key] for key in LINES] for lines in mechanisms])
    _schedules(schedules)
    more = "headloom list NAME prints the options of one; headloom list --costs measures cache, scores and grafts."
    console().print(f"\n{more}", markup=False, soft_wrap=True)


def _options(name: str, as_json: bool) -> None:
    from headloom.costs import catalogue
    from headloom.costs.options import options
    from headloom.lab.spec.names import described
    from headloom.lab.spec.variants import defaults

    usual = defaults()
    found = options(name, usual.options.get(name, {}))
    if as_json:
        print_json([dataclasses.asdict(option) for option in found])
        return
    lines = next(lines for part in described() for lines in part if lines["name"] == name)
    out = console()
    paper = f" ({lines['paper']})" if lines["paper"] else ""
    out.print(f"{name}: {lines['title']}{paper}\n{lines['summary']}", markup=False, soft_wrap=True)
    of_bases = list(dict.fromkeys(base for option in found for base in option.bases))
    parts = {
        "Its own options": [option for option in found if option.own],
        f"Options of base {' and '.join(of_bases)}": [option for option in found if option.bases],
        "Options of all mechanisms": [option for option in found if not option.own and not option.bases],
    }
    for heading, rows in parts.items():
        if rows:
            out.print(f"\n{heading}", markup=False)
            out.print(_definitions(rows))
    sizes = ", ".join(f"{field}={value}" for field, value in catalogue.SIZES.items() if field != "rope_theta")
    out.print(
        f"\nCosts are those of one layer with another value, relative to the defaults: parameters, forward FLOPs, "
        f"bytes of the cache, FLOPs of the scores alone, at {sizes}, {catalogue.TOKENS:,} tokens. Costs that are not "
        f"listed do not change. In --variants, write {name}:option=value, and none for None.",
        markup=False,
        soft_wrap=True,
    )


def _definitions(rows: list[Option]) -> Table:
    """A table with the option's name and, beside it, its values, default, meaning and cost."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold", ratio=1)
    for row in rows:
        default = "" if row.default == "" else f"; default {_word(row.default)}"
        usual = "" if row.usual is None else f"; in comparisons {_word(row.usual)}"
        told = [f"{row.values}{default}{usual}", row.meaning]
        for value, ratios in row.costs.items():
            changed = [f"{words} x {ratio:.3g}" for words, ratio in ratios.items() if abs(ratio - 1) >= 0.005]
            if changed:
                told.append(f"{value}: {', '.join(changed)}")
        table.add_row(row.name, Text("\n".join(told)))
    return table


def _word(value: object) -> str:
    from headloom.lab.spec.options import option_text

    return option_text(value)


def _measured(as_json: bool) -> None:
    from headloom.costs import catalogue
    from headloom.lab.spec.names import described
    from headloom.lab.spec.variants import defaults

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
        f"\ncache: numbers per token; scores: FLOPs between tokens, relative to {usual.reference}; both at {sizes}, "
        f"{catalogue.TOKENS:,} tokens. graft keeps: a graft starts with the function of the original model.",
        markup=False,
        soft_wrap=True,
    )
    for entry in found:
        for name, value in entry.options.items():
            line = f"{entry.name} is measured with {name}={_word(value)}: the comparison's default."
            console().print(line, markup=False, soft_wrap=True)
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
        text = f"schedule {lines['name']}: {lines['summary']}" + (f" ({lines['paper']})" if lines["paper"] else "")
        console().print(text, markup=False, soft_wrap=True)
