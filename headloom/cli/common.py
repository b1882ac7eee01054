"""What the commands share: how errors end a command, and how results are printed."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from contextlib import contextmanager, redirect_stdout
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar

import typer

from headloom.core.errors import HeadloomError, RunError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

RUN_FAILED, WRONG_CALL, INTERRUPTED = 1, 2, 130

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout and nothing else there.")]
DATA_KINDS = (
    "a text file, a table (.jsonl, .json, .csv, .tsv, .parquet), a folder of these, a folder that save_to_disk wrote, "
    "or a Hugging Face data set"
)
TextColumn = Annotated[
    str | None, typer.Option(help="Of tables and saved or hub data sets: the column with the text. Default: text.")
]
Size = Annotated[str, typer.Option("--size", help="tiny, small, 125M, 350M, 1.3B, 2.4B, 2.7B, 6.7B or 10.6B.")]


def ends_with_status(command: Callable[P, R]) -> Callable[P, R]:
    """A user's fault ends a command with one line on stderr and the status that belongs to it, never a traceback."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except HeadloomError as error:
            line = " ".join(str(error).split())
            typer.echo(f"error: {line}", err=True)
            raise typer.Exit(RUN_FAILED if isinstance(error, RunError) else WRONG_CALL) from None

    return wrapped


@contextmanager
def only_json_on_stdout(wanted: bool) -> Iterator[IO[str]]:
    """Yields the stream for the result; with `wanted`, whatever a library prints meanwhile goes to stderr."""
    out = sys.stdout
    if wanted:
        with redirect_stdout(sys.stderr):
            yield out
    else:
        yield out


def print_json(value: Any, out: IO[str] | None = None) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False), file=out or sys.stdout)


def console() -> Console:
    """stdout for people; wide where it is no terminal, so that a table in a log keeps its columns."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=180)
