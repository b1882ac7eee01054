"""What a comparison tells while it runs. The base class says nothing; `Bar` draws one bar for the whole."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from headloom.core.errors import HeadloomError


class Progress:
    """Called by a study; every method may be left as it is. Runs may go on side by side."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def note(self, text: str) -> None:
        """A line worth reading: a decision taken, a run that failed."""

    def stage(self, text: str) -> None:
        """What is being done before the runs."""

    def start(self, runs: int, steps: int, done: int) -> None:
        """`runs` runs, `done` of them kept from before; the others take `steps` steps together."""

    def more(self, runs: int, steps: int) -> None:
        """So many runs and steps come on top of those of `start`."""

    def run(self, name: str, number: int) -> None:
        """Run `number` (from 1) begins."""

    def step(self, number: int, step: int, loss: float) -> None:
        """Run `number` has made `step` steps."""

    def ran(self, number: int, summary: str) -> None:
        """Run `number` has ended."""


def told(progress: Progress | bool | None) -> Progress:
    """What a call is told by: None or True the usual `Bar`, False nothing, or the caller's own."""
    if progress is None or progress is True:
        return Bar()
    if progress is False:
        return Progress()
    if not isinstance(progress, Progress):
        raise HeadloomError(f"progress must be true, false, or a headloom.lab.run.progress.Progress, not {progress!r}")
    return progress


class Bar(Progress):
    """One bar over the steps of all runs on stderr, with the run that moved last, its loss and the time left.

    Where stderr is no terminal, one line a run instead. `noted`: what `note` has said, which need not be said again.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._console = Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._bar = RichProgress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._live,
        )
        self._task = self._bar.add_task("preparing", total=None)
        self._runs = self._steps = 0
        self._names: dict[int, str] = {}
        self._made: dict[int, int] = {}
        self.noted: list[str] = []

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Print the line above the bar, and remember it."""
        self.noted.append(text)
        self._line(text)

    def _line(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        """Say it beside the bar."""
        self._bar.update(self._task, description=text)
        if not self._live:
            self._line(text)

    def start(self, runs: int, steps: int, done: int) -> None:
        """Begin the bar over all steps."""
        self._runs, self._steps = runs, steps
        # A new task, so that the time left is reckoned from the runs alone.
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task("training", total=steps)
        self._made = {}

    def more(self, runs: int, steps: int) -> None:
        """Make the bar longer."""
        self._runs, self._steps = self._runs + runs, self._steps + steps
        self._bar.update(self._task, total=self._steps)

    def run(self, name: str, number: int) -> None:
        """Name the run beside the bar."""
        self._names[number] = f"{number}/{self._runs} {name}"
        self._bar.update(self._task, description=self._names[number])

    def step(self, number: int, step: int, loss: float) -> None:
        """Move the bar."""
        self._made[number] = step
        self._bar.update(
            self._task,
            completed=sum(self._made.values()),
            description=f"{self._names[number]} step {step} loss {loss:.3f}",
        )

    def ran(self, number: int, summary: str) -> None:
        """Print a line on the run."""
        self._line(f"{self._names[number]}: {summary}")
