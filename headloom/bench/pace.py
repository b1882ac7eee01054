"""How fast a training loop goes: `train`, with all it records, and transformers' own Trainer as it comes.

Both get the same rows in the same order and the same training arguments (`training_arguments`). What is theirs is
plain: the default collator, optimizer, schedule and callbacks, and the default logging, which writes nothing in so few
steps; `train` writes its record of every step, which therefore counts against it alone. Neither validates in the steps
that are timed, nor saves checkpoints, which cost by the minute and not by the step.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from headloom.data.packing import TokenData, TokenStream, TrainingRows
from headloom.train.config import Recipe
from headloom.train.run import isolated, resolve, train
from headloom.train.trainer import training_arguments

WARM, TIMED = 3, 10
"""Steps of a chunk before the clock starts, and on it. One more follows, since the last one's end is a validation."""


class Pace:
    """Chunks of training on random text, a chunk at a time, so that loops can take turns.

    Args:
        vocab_size, tokens, batch_size: of the text and of a step.
        settings: other fields of the recipe that both loops follow.
    """

    def __init__(self, *, vocab_size: int, tokens: int, batch_size: int, **settings: Any) -> None:
        steps = WARM + TIMED + 1
        self.tokenizer = _numbers(vocab_size)
        generator = np.random.default_rng(0)
        rows = steps * batch_size

        def stream(count: int) -> TokenStream:
            ids = generator.integers(vocab_size, size=count * (tokens - 1) + 1)
            return TokenStream(ids, bytes=len(ids), documents=1)

        self.data = TokenData(stream(rows), stream(1), vocab_size, "random numbers")
        recipe = Recipe(name="pace", tokens=tokens, batch_size=batch_size, steps=steps, **settings)
        self.run = resolve(recipe, self.data, self.tokenizer)

    def ours(self, model: PreTrainedModel) -> float:
        """Seconds of a step of `train`, from the end of one step's record to the end of another's."""
        clock = _Clock()
        with tempfile.TemporaryDirectory() as folder:
            train(
                self.run,
                self.data,
                self.tokenizer,
                Path(folder) / "run",
                lambda step, steps, loss: clock.ended(step),
                checkpoint_seconds=None,
                make_model=lambda run, tokenizer: model,
            )
        return clock.seconds

    def theirs(self, model: PreTrainedModel) -> float:
        """Seconds of a step of transformers' Trainer, from the end of one to the end of another."""
        clock, run = _Clock(), self.run
        rows = TrainingRows(self.data.train, context=run.tokens, seed=run.seed, count=run.steps * run.batch_size)
        with isolated(run), tempfile.TemporaryDirectory() as folder:
            arguments = training_arguments(run, folder)
            arguments._n_gpu = min(1, arguments.n_gpu)
            arguments.logging_steps = TrainingArguments.logging_steps
            trainer = Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[clock])
            trainer.remove_callback(PrinterCallback)
            trainer.train()
        return clock.seconds


class _Clock(TrainerCallback):
    """Synchronises at the first and last timed step only: waiting for the device at every step would slow it down."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def ended(self, step: int) -> None:
        if step in (WARM, WARM + TIMED):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            self._ends.append(time.perf_counter())

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ended(state.global_step)

    @property
    def seconds(self) -> float:
        start, end = self._ends
        return (end - start) / TIMED


def _numbers(vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of so many words: the model needs its size and its special tokens."""
    words = {str(number): number for number in range(vocab_size)}
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(words, unk_token="0")), eos_token="0")
