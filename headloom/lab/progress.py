"""What a comparison tells while it runs. The base class says nothing; `Bar` draws one bar for the whole."""

from __future__ import annotations

from types import TracebackType
from typing import Self


class Progress:
    """Called by `compare`; every method may be left as it is."""

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
        """`runs` runs of `steps` steps each, `done` of them kept from before."""

    def run(self, label: str, seed: int, number: int) -> None:
        """Run `number` (from 1) begins."""

    def step(self, step: int, loss: float) -> None:
        """The current run has made `step` steps."""

    def ran(self, summary: str) -> None:
        """The current run has ended."""


class Bar(Progress):
    """One bar over runs x steps on stderr, with the current variant, its loss and the time left.

    Where stderr is no terminal, one line a run instead.
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
        self._runs, self._steps, self._done = 0, 0, 0
        self._name = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)

    def stage(self, text: str) -> None:
        self._bar.update(self._task, description=text)
        if not self._live:
            self.note(text)

    def start(self, runs: int, steps: int, done: int) -> None:
        self._runs, self._steps, self._done = runs, steps, done
        # A new task, so that the time left is reckoned from the runs alone.
        self._bar.remove_task(self._task)
        self._task = self._bar.add_task("training", total=(runs - done) * steps)
        self._finished = 0

    def run(self, label: str, seed: int, number: int) -> None:
        self._name = f"{number}/{self._runs} {label} seed {seed}"
        self._bar.update(self._task, description=self._name)

    def step(self, step: int, loss: float) -> None:
        self._bar.update(
            self._task,
            completed=self._finished * self._steps + step,
            description=f"{self._name} step {step} loss {loss:.3f}",
        )

    def ran(self, summary: str) -> None:
        self._finished += 1
        self._bar.update(self._task, completed=self._finished * self._steps)
        self.note(f"{self._name}: {summary}")
