"""What is done in a worker: one training run, or one measurement of step times. The same for every engine."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headloom.core.errors import HeadloomError, RunError
from headloom.core.files import is_full

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from headloom.data.packing import TokenData, TokenStream

OnStep = Callable[[int, float], None]


@dataclass(frozen=True)
class Bundle:
    """What all jobs of a study share."""

    data: TokenData
    selection: TokenStream | None
    tokenizer: PreTrainedTokenizerFast
    foreign: tuple[Foreign, ...] = ()


@dataclass(frozen=True)
class Foreign:
    """A mechanism registered from outside the package: where another process finds its class."""

    module: str
    cls: str
    file: str

    def load(self) -> None:
        """Import and register it, by the module's name or else from its file."""
        from headloom.mechanism import register

        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError:
            spec = importlib.util.spec_from_file_location(self.module, self.file)
            assert spec is not None and spec.loader is not None
            module = sys.modules[self.module] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        register(getattr(module, self.cls))


def foreign(names: Iterable[str], *, same_process: bool = False) -> tuple[Foreign, ...]:
    """Those of the named mechanisms that other processes have to be told of.

    Raises HeadloomError for a class that only this program has, unless everything stays in this process.
    """
    from headloom.mechanism import mechanisms

    found = []
    for name in dict.fromkeys(names):
        cls = mechanisms()[name].cls
        if cls.__module__.startswith("headloom.mechanism.") or same_process:
            continue
        file = getattr(sys.modules.get(cls.__module__), "__file__", None)
        if cls.__module__ == "__main__" or "." in cls.__qualname__ or file is None:
            raise HeadloomError(
                f"runs have processes of their own, which cannot import {name}'s class {cls.__qualname__} from "
                f"'{cls.__module__}': put it into a module (a file of its own) and import that, or use engine='inline'"
            )
        found.append(Foreign(cls.__module__, cls.__qualname__, file))
    return tuple(found)


@dataclass(frozen=True)
class Job:
    """name: for people. folder: of the run; None for a measurement. settings: JSON values that say what to do."""

    name: str
    kind: Literal["train", "time"]
    folder: str | None
    settings: Mapping[str, Any]


class Failed(RunError):
    """A job that came to nothing, with the reason."""


def work(job: Job, bundle: Bundle, on_step: OnStep) -> dict[str, Any]:
    """Do a job; its result as JSON values. Raises Failed for what can befall a run, and KeyboardInterrupt."""
    from headloom.train import run as runs
    from headloom.train.config import RunConfig

    try:
        for mechanism in bundle.foreign:
            mechanism.load()
        if job.kind == "time":
            from headloom.lab.plan.timing import step_times

            configs = {label: RunConfig(**values) for label, values in job.settings["runs"].items()}
            return step_times(configs, bundle.data, bundle.tokenizer)
        assert job.folder is not None
        result = runs.train(
            RunConfig(**job.settings["run"]),
            bundle.data,
            bundle.tokenizer,
            Path(job.folder),
            lambda step, steps, loss: on_step(step, loss),
            selection=bundle.selection,
            flops_per_token=job.settings["flops_per_token"],
            checkpoint_seconds=job.settings["checkpoint_seconds"],
            track=job.settings["track"],
        )
        return {"bits_per_byte": result.bits_per_byte, "train_seconds": result.train_seconds}
    except (HeadloomError, RuntimeError, MemoryError, ArithmeticError, OSError) as error:
        raise Failed(reason(error)) from error


def reason(error: BaseException) -> str:
    """Why a job failed, in one line."""
    if isinstance(error, HeadloomError):
        return str(error)
    text = " ".join(str(error).split())[:300]
    if is_full(error):
        return f"the disk is full ({text}): free some space, and give the same command again"
    if isinstance(error, MemoryError) or "out of memory" in text.lower() or "can't allocate memory" in text.lower():
        return f"out of memory ({type(error).__name__}: {text or 'no details'}): give a smaller batch_size or size"
    return f"{type(error).__name__}: {text}"
