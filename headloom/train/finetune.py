"""Fine-tuning a checkpoint with and without a graft, the same way, and what each pays for text it has not seen.

Every arm is one `headloom.train.train`: the same rows in the same order, steps, learning rates and seeds; they differ
in the attention alone. Seeds order the data; a graft starts the same for all of them. The folder:

    config.json               what was asked, and the data's fingerprint; another question is refused
    result.json               everything measured, rewritten as each run ends
    <arm>/before.json         bits per byte before training, parameters, and what the graft changed
    <arm>/seed-<n>/           one run as headloom.train.records says, with the tuned model in model/
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from headloom import hf
from headloom.core.errors import HeadloomError
from headloom.core.files import saying_when_full, write_json
from headloom.core.locks import LOCK, locked
from headloom.data import Corpus, TokenData, prepare
from headloom.evaluate.bits import bits_per_byte
from headloom.hf import checkpoints
from headloom.hf.grafting.groups import mix_groups
from headloom.hf.places import new_folder
from headloom.train import records
from headloom.train.config import Arm, FineTuneConfig, fine_tunings
from headloom.train.records import RunResult, versions
from headloom.train.run import resolve, train

BEFORE = "before.json"
Runs = Mapping[tuple[str, int], FineTuneConfig]


class Progress(Protocol):
    """What is told while it runs; `headloom.lab.run.progress.Bar` serves."""

    def stage(self, text: str) -> None: ...
    def note(self, text: str) -> None: ...
    def start(self, runs: int, steps: int, done: int) -> None: ...
    def run(self, name: str, number: int) -> None: ...
    def step(self, number: int, step: int, loss: float) -> None: ...
    def ran(self, number: int, summary: str) -> None: ...


def finetune(
    arms: Mapping[str, Arm],
    corpus: Corpus,
    out: str | Path,
    *,
    seeds: int = 1,
    validation_bytes: int | None = 2**16,
    save_models: bool = True,
    checkpoint_seconds: float | None = 60.0,
    progress: Progress | None = None,
    **recipe: Any,
) -> dict[str, Any]:
    """Train every arm with every seed and measure it before and after.

    Args:
        arms: by name, at least one; all with the first one's tokenizer.
        out: a new folder, or one this very call left: its finished runs are kept, and one that was stopped goes on from
            its last checkpoint to the numbers it would have had.
        seeds: runs an arm, with seeds 0, 1, ...
        validation_bytes: of held-out text, at most (None: all of it).
        checkpoint_seconds: training time between a run's checkpoints, 0 for one after every step, None for none.
        recipe: `tokens`, `batch_size`, `steps`, `learning_rate`, ... of `headloom.train.config.Recipe`.
    Returns:
        What result.json holds.
    Raises:
        HeadloomError: a wrong call, or another process is writing `out`; nothing was trained.
        RunError: a run's numbers are no longer finite; what was finished before it stays.
    """
    out = Path(out)
    configs = fine_tunings(arms, seeds, **recipe)
    first = next(iter(configs.values()))
    tokenizer = _tokenizer(arms)
    data = prepare(corpus, tokenizer, context=first.tokens, validation_bytes=validation_bytes)
    asked = {"fingerprint": data.fingerprint, "runs": [config.to_dict() for config in configs.values()]}
    _check(out, asked)
    with locked(out), saying_when_full(out):
        done = {key for key, run in configs.items() if _finished(_folder(out, *key), resolve(run, data, tokenizer))}
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
            _result(out, configs, data)
        return _result(out, configs, data)


def _train(
    config: FineTuneConfig,
    data: TokenData,
    tokenizer: PreTrainedTokenizerFast,
    out: Path,
    asked: dict[str, Any],
    save_model: bool,
    checkpoint_seconds: float | None,
    told: Callable[[int, float], None] | None,
) -> RunResult:
    before = out / config.name / BEFORE

    def make(run: FineTuneConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
        model = checkpoints.load_checkpoint(run.model, dtype="float32", causal=True).model.to(run.device)
        report = None
        if run.graft is not None:
            spec = run.graft
            model = hf.graft(model, spec.mechanism, layers=spec.layers, allow_change=spec.allow_change, **spec.options)
            report = model.graft_report
        _fits(model, run, tokenizer)
        before.parent.mkdir(parents=True, exist_ok=True)  # only now: a call that was wrong leaves nothing behind
        write_json(out / records.CONFIG, asked)
        if not before.is_file():
            size = run.eval_batch_size or run.micro_batch_size
            half = torch.bfloat16 if run.dtype == "bfloat16" else None
            found = bits_per_byte(model, data.validation, context=run.tokens, batch_size=size, dtype=half)
            write_json(before, {**_about(model, report), "bits_per_byte": found.bits_per_byte, "text": found.text})
        return model

    def step(step: int, steps: int, loss: float) -> None:
        if told:
            told(step, loss)

    rate = config.mix_learning_rate
    return train(
        config,
        data,
        tokenizer,
        _folder(out, config.name, config.seed),
        step,
        checkpoint_seconds=checkpoint_seconds,
        save_model=save_model,
        groups=hf.parameter_groups if rate is None else partial(mix_groups, mix_learning_rate=rate),
        make_model=make,
    )


def _about(model: PreTrainedModel, report: hf.GraftReport | None) -> dict[str, Any]:
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "graft": None if report is None else str(report),
        "difference": None if report is None else report.difference,
    }


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
def _folder(out: Path, name: str, seed: int) -> Path:
    return out / name / f"seed-{seed}"


def _check(out: Path, asked: dict[str, Any]) -> None:
    """Refuse a folder that holds something else."""
    held = out / records.CONFIG
    if not held.is_file():
        new_folder(out, besides=LOCK)
    elif json.loads(held.read_text(encoding="utf-8")) != asked:
        raise HeadloomError(
            f"'{out}' holds another fine-tuning (other data or settings): give another folder, or remove this one"
        )


def _finished(folder: Path, config: FineTuneConfig) -> bool:
    """Whether this very run is complete in `folder`."""
    held = folder / records.CONFIG
    if not (folder / records.RESULT).is_file() or not held.is_file():
        return False
    return json.loads(held.read_text(encoding="utf-8")) == config.to_dict()


def _result(out: Path, configs: Runs, data: TokenData) -> dict[str, Any]:
    """Everything measured so far, as result.json."""
    arms: dict[str, dict[str, Any]] = {}
    for (name, seed), config in configs.items():
        folder = _folder(out, name, seed)
        if not (folder / records.RESULT).is_file():
            continue
        if name not in arms:
            before = json.loads((out / name / BEFORE).read_text(encoding="utf-8"))
            spec = None if config.graft is None else config.graft.model_dump(mode="json")
            arms[name] = {"model": config.model, "graft": spec, "before": before, "runs": []}
        run = RunResult.read(folder).to_dict()
        arms[name]["runs"].append({key: value for key, value in run.items() if key not in ("versions", "machine")})
    shared = next(iter(configs.values()))
    found = {
        "data": data.title,
        "notes": list(data.notes),
        "fingerprint": data.fingerprint,
        "settings": {k: v for k, v in shared.to_dict().items() if k not in ("name", "seed", "model", "graft")},
        "complete": sum(len(arm["runs"]) for arm in arms.values()) == len(configs),
        "arms": arms,
        "versions": versions(),
        "machine": records.ran_on(),
    }
    write_json(out / records.RESULT, found)
    return found
