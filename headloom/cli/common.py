"""What all commands share: how an error ends a command, and how results are printed."""

from __future__ import annotations

import functools
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import IO, TYPE_CHECKING, Annotated, Any, ParamSpec, TypeVar, get_type_hints

import typer

from headloom.core.errors import HeadloomError, RunError
from headloom.core.files import is_full

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.console import Console

P = ParamSpec("P")
R = TypeVar("R")

RUN_FAILED, WRONG_CALL, INTERRUPTED, TERMINATED = 1, 2, 130, 143

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout and nothing else there.")]
DATA_KINDS = (
    "a text file, a table (.jsonl, .json, .csv, .tsv, .parquet), a folder of these, a folder that save_to_disk wrote, "
    "or a Hugging Face data set"
)
TextColumn = Annotated[
    str | None, typer.Option(help="The column with the text, in tables and data sets. Default: text.")
]
Size = Annotated[str, typer.Option("--size", help="tiny, small, 125M, 350M, 1.3B, 2.4B, 2.7B, 6.7B or 10.6B.")]


def ends_with_status(command: Callable[P, R]) -> Callable[P, R]:
    """A wrong call ends a command with one line on stderr and the matching exit status, without a traceback.

    SIGTERM stops a command as Ctrl-C does, with another exit status.
    """

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with _sigterm_interrupts() as terminated:
            try:
                found = command(*args, **kwargs)
                sys.stdout.flush()  # here, where its errors are caught
                return found
            except HeadloomError as error:
                line = _in_options(" ".join(str(error).split()), command)
                typer.echo(f"error: {line}", err=True)
                raise typer.Exit(RUN_FAILED if isinstance(error, RunError) else WRONG_CALL) from None
            except (KeyboardInterrupt, typer.Exit):
                if terminated.is_set():
                    raise typer.Exit(TERMINATED) from None
                raise
            except Exception as error:
                if not is_full(error):
                    raise
                why = " ".join(str(error).split())
                typer.echo(f"error: the disk is full ({why}): free some space", err=True)
                with suppress(OSError, ValueError):  # otherwise Python tries to write again when it exits
                    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(RUN_FAILED) from None

    return wrapped


def _in_options(line: str, command: Callable[..., Any]) -> str:
    """An error's line, in which the command's options replace the names of Python arguments: `allow_change=True`
    becomes --allow-change, and `learning_rate: ...` at the start becomes --learning-rate: ..."""
    from typer.models import OptionInfo

    for name, hint in get_type_hints(command, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo):
                spelled = next(iter(option.param_decls or ()), "--" + name.replace("_", "-"))
                line = re.sub(rf"\b{name}=True\b", spelled, line)
                line = re.sub(rf"^{name}: ", f"{spelled}: ", line)
    return line


@contextmanager
def _sigterm_interrupts() -> Iterator[threading.Event]:
    """Inside, SIGTERM raises KeyboardInterrupt and sets the event, unless the caller has a handler of its own."""
    terminated = threading.Event()

    def interrupt(*_: Any) -> None:
        terminated.set()
        raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield terminated
        return
    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield terminated
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@contextmanager
def only_json_on_stdout(wanted: bool) -> Iterator[IO[str]]:
    """Yield the stream for the result. If `wanted`, what libraries print inside the context goes to stderr."""
    out = sys.stdout
    if wanted:
        with redirect_stdout(sys.stderr):
            yield out
    else:
        yield out


def print_json(value: Any, out: IO[str] | None = None) -> None:
    """Print a value as indented JSON, to stdout unless `out` is given."""
    print(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False), file=out or sys.stdout)


def console() -> Console:
    """A rich Console on stdout. It is 195 columns wide if stdout is no terminal, so that tables in a log stay whole."""
    from rich.console import Console

    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=195)


def words(text: str) -> list[str]:
    """["forward", "backward"] from "forward, backward"."""
    return [part.strip() for part in text.split(",") if part.strip()]


def whole_numbers(name: str, text: str | None, default: Sequence[int] = ()) -> list[int]:
    """[512, 2048] from "512,2048", the value of the option --name; `default` if the option was not given."""
    if text is None:
        return list(default)
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise HeadloomError(f"--{name} must be whole numbers separated by commas (512,2048), not '{text}'") from None
