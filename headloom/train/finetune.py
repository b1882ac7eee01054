"""Fine-tune a checkpoint with and without a graft in the same way, and measure both on held-out text.

Each arm (the grafted and the ungrafted model) is trained by `headloom.train.run.train` with the same sequences in the
same order, the same steps, learning rates and seeds; only the attention differs. The seed sets the order of the data;
a graft is initialised equally for all seeds. The content of the folder is described in `headloom.records.tuning`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from headloom import hf
from headloom.core.errors import HeadloomError
from headloom.core.files import saying_when_full
from headloom.core.locks import LOCK, locked
from headloom.core.machine import ran_on, versions
from headloom.data.corpus import Corpus
from headloom.data.packing import TokenData, prepare
from headloom.evaluate.bits import bits_per_byte
from headloom.hf import checkpoints
from headloom.hf.grafting.groups import mix_groups
from headloom.hf.places import new_folder
from headloom.records import runs
from headloom.records.runs import RunResult
from headloom.records.surroundings import Machine
from headloom.records.tuning import (
    ASKED,
    BEFORE,
    RESULT,
    BeforeTuning,
    TunedArm,
    TuningAsked,
    TuningResult,
    run_folder,
)
from headloom.train.config import Arm, FineTuneConfig, fine_tunings
from headloom.train.run import resolve, train

Runs = Mapping[tuple[str, int], FineTuneConfig]


class TuningProgress(Protocol):
    """Is called while the fine-tuning runs, for example to draw a progress bar (`headloom.lab.run.progress.Bar`)."""

    def stage(self, text: str) -> None:
        """A new stage begins: "reading the text"."""

    def note(self, text: str) -> None:
        """A note on the data that people should read."""

    def start(self, runs: int, steps: int, done: int) -> None:
        """Training begins: `runs` in all, of `steps` steps each; `done` of them were finished before."""

    def run(self, name: str, number: int) -> None:
        """Run `number` begins."""

    def step(self, number: int, step: int, loss: float) -> None:
        """Run `number` has made `step` steps."""

    def ran(self, number: int, summary: str) -> None:
        """Run `number` has ended."""


def finetune(
    arms: Mapping[str, Arm],
    corpus: Corpus,
    out: str | Path,
    *,
    seeds: int = 1,
    validation_bytes: int | None = 2**16,
    save_models: bool = True,
    checkpoint_seconds: float | None = 60.0,
    progress: TuningProgress | None = None,
    **recipe: Any,
) -> TuningResult:
    """Train every arm with every seed and measure it before and after.

    Args:
        arms: name -> arm, at least one. All use the tokenizer of the first one.
        out: a new folder, or the folder of this same call: its finished runs are kept, and a stopped run continues from
            its last checkpoint to the same numbers.
        seeds: runs of each arm, with seeds 0, 1, ...
        validation_bytes: bytes of held-out text, at most (None: all of it).
        checkpoint_seconds: training time between a run's checkpoints, 0 for one after every step, None for none.
        recipe: `tokens`, `batch_size`, `steps`, `learning_rate`, ... of `headloom.train.config.Recipe`.
    Returns:
        The content of `out`/result.json.
    Raises:
        HeadloomError: a wrong call, or another process is writing `out`; nothing was trained.
        RunError: a run's numbers are no longer finite; what was finished before it stays.
    """
    out = Path(out)
    configs = fine_tunings(arms, seeds, **recipe)
    first = next(iter(configs.values()))
    tokenizer = _tokenizer(arms)
    data = prepare(corpus, tokenizer, context=first.tokens, validation_bytes=validation_bytes)
    asked = TuningAsked(fingerprint=data.fingerprint, runs=tuple(config.to_dict() for config in configs.values()))
    _check(out, asked)
    with locked(out), saying_when_full(out):
        done = {key for key, run in configs.items() if _finished(run_folder(out, *key), resolve(run, data, tokenizer))}
        known: dict[tuple[str, int], RunResult] = {}
        if progress:
            for note in data.notes:
                progress.note(note)
            progress.start(len(configs), first.steps, len(done))
        for number, (key, config) in enumerate(configs.items(), start=1):
            if key in done:
                continue
            if progress:
                progress.run("{} seed {}".format(*key), number)
            told = partial(progress.step, number) if progress else None
            result = _train(config, data, tokenizer, out, asked, save_models, checkpoint_seconds, told)
            if progress:
                progress.ran(number, f"{result.bits_per_byte:.4f} bits per byte after {result.train_seconds:.0f} s")
            _result(out, configs, data, known)
        return _result(out, configs, data, known)


def _train(
    config: FineTuneConfig,
    data: TokenData,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    asked: TuningAsked,
    save_model: bool,
    checkpoint_seconds: float | None,
    told: Callable[[int, float], None] | None,
) -> RunResult:
    arm = out / config.name

    def make(run: FineTuneConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        model = checkpoints.load_checkpoint(run.model, dtype="float32", causal=True).model.to(run.device)
        report = None
        if run.graft is not None:
            spec = run.graft
            model = hf.graft(model, spec.mechanism, layers=spec.layers, allow_change=spec.allow_change, **spec.options)
            report = model.graft_report
        _fits(model, run, tokenizer)
        arm.mkdir(parents=True, exist_ok=True)  # not earlier: a wrong call must not leave a folder behind
        ASKED.write(out, asked)
        if not BEFORE.is_in(arm):
            size = run.eval_batch_size or run.micro_batch_size
            half = torch.bfloat16 if run.dtype == "bfloat16" else None
            found = bits_per_byte(model, data.validation, context=run.tokens, batch_size=size, dtype=half)
            before = BeforeTuning(
                parameters=sum(p.numel() for p in model.parameters()),
                graft=None if report is None else str(report),
                difference=None if report is None else report.difference,
                bits_per_byte=found.bits_per_byte,
                text=found.text,
            )
            BEFORE.write(arm, before)
        return model

    def step(step: int, steps: int, loss: float) -> None:
        if told:
            told(step, loss)

    rate = config.mix_learning_rate
    return train(
        config,
        data,
        tokenizer,
        run_folder(out, config.name, config.seed),
        step,
        checkpoint_seconds=checkpoint_seconds,
        save_model=save_model,
        groups=hf.parameter_groups if rate is None else partial(mix_groups, mix_learning_rate=rate),
        make_model=make,
    )


def _tokenizer(arms: Mapping[str, Arm]) -> PreTrainedTokenizerFast:
    """The one tokenizer of all arms."""
    found = {source: checkpoints.load_tokenizer(source) for source in {arm.model: None for arm in arms.values()}}
    (source, tokenizer), *others = found.items()
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or tokenizer.eos_token_id is None:
        raise HeadloomError(
            f"'{source}' needs a fast tokenizer (tokenizer.json) with an end-of-text token beside the model"
        )
    for other, theirs in others:
        if theirs is None or theirs.get_vocab() != tokenizer.get_vocab():
            raise HeadloomError(f"'{other}' has another tokenizer than '{source}': these two cannot be compared")
    return tokenizer


def _fits(model: PreTrainedModel, run: FineTuneConfig, tokenizer: PreTrainedTokenizerFast) -> None:
    embeddings: Any = model.get_input_embeddings()
    rows = embeddings.weight.shape[0]
    longest = getattr(model.config, "max_position_embeddings", None)
    if len(tokenizer) > rows:
        raise HeadloomError(f"'{run.model}' knows {rows} tokens, its tokenizer makes {len(tokenizer)}: they do not fit")
    if longest is not None and run.tokens > longest:
        raise HeadloomError(f"tokens must be at most {longest}, what '{run.model}' was made for, not {run.tokens}")


# ---- the folder -----------------------------------------------------------------------------------------------------
def _check(out: Path, asked: TuningAsked) -> None:
    """Raise HeadloomError if the folder holds something else."""
    if not ASKED.is_in(out):
        new_folder(out, besides=LOCK)
    elif ASKED.read(out) != asked:
        raise HeadloomError(
            f"'{out}' holds another fine-tuning (other data or settings): give another folder, or remove this one"
        )


def _finished(folder: Path, config: FineTuneConfig) -> bool:
    """Whether `folder` holds this same run, complete."""
    return runs.RESULT.is_in(folder) and runs.CONFIG.read_if_there(folder) == config.to_dict()


def _result(out: Path, configs: Runs, data: TokenData, known: dict[tuple[str, int], RunResult]) -> TuningResult:
    """Everything measured so far, as result.json. `known`: the results that were read before, which do not change."""
    for key in configs.keys() - known.keys():
        result = runs.RESULT.read_if_there(run_folder(out, *key))
        if result is not None:
            known[key] = result
    arms = {}
    for name in dict.fromkeys(name for name, _ in configs):
        mine = [key for key in configs if key[0] == name and key in known]
        if mine:
            config = configs[mine[0]]
            arms[name] = TunedArm(
                model=config.model,
                graft=None if config.graft is None else config.graft.model_dump(mode="json"),
                before=BEFORE.read(out / name),
                runs=tuple(known[key].numbers for key in mine),
            )
    shared = next(iter(configs.values())).to_dict()
    found = TuningResult(
        data=data.title,
        notes=tuple(data.notes),
        fingerprint=data.fingerprint,
        settings={key: value for key, value in shared.items() if key not in ("name", "seed", "model", "graft")},
        complete=len(known) == len(configs),
        arms=arms,
        versions=versions(),
        machine=Machine.model_validate(ran_on()),
    )
    RESULT.write(out, found)
    return found
