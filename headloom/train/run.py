"""One training run from configuration to result."""

from __future__ import annotations

import os
import random
import shutil
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.utils import logging

from headloom import hf
from headloom.core.errors import HeadloomError, RunError
from headloom.core.files import DiskFull, is_full, saying_when_full, whole_folder
from headloom.core.locks import locked
from headloom.core.machine import ran_on, versions
from headloom.data.packing import TokenData, TokenStream, TrainingRows
from headloom.evaluate.bits import bits_per_byte
from headloom.ops import scores
from headloom.records.arrays import write_mixes, write_pictures
from headloom.records.metrics import Metrics
from headloom.records.runs import CHECKPOINTS, FAILURE, MODEL, RESULT, RunFailure, RunResult
from headloom.records.surroundings import Machine
from headloom.train import checkpoints, sharding, tracking
from headloom.train import folder as folders
from headloom.train.config import Recipe, RunConfig, check_device
from headloom.train.trainer import OnProgress, ParameterGroups, Recorder, RunTrainer
from headloom.train.weights import checksum, drawn, mixing_weights, pictures, values

R = TypeVar("R", bound=Recipe)

WARM_STEPS = 5


def build(
    run: RunConfig, tokenizer: PreTrainedTokenizerFast | None = None, device: str | None = None
) -> PreTrainedModel:
    """Build the model of a resolved run: a Llama, or the model of its `backbone`, with the run's attention. The initial
    value of every tensor depends on (seed, name). Its config holds the tokenizer's special tokens. On device "meta" it
    takes no memory, for counting."""
    what = run.specs[0] if len(run.specs) == 1 else run.specs
    given: dict[str, Any] = {
        "vocab_size": run.vocab_size,
        "hidden_size": run.hidden_size,
        "num_layers": run.num_layers,
        "num_heads": run.num_heads,
        "num_kv_heads": run.num_kv_heads,
        "head_dim": run.head_dim,
        "intermediate_size": run.intermediate_size,
        "seed": run.seed,
        "device": device,
        **{name: getattr(tokenizer, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")},
    }
    if run.backbone is not None:
        given["head_dim"] = run.head_dim or run.hidden_size // run.num_heads
        return hf.build_around(what, run.backbone, tokens=run.tokens, **given)
    return hf.build_model(
        what,
        max_positions=run.tokens,
        tie_embeddings=run.tie_embeddings,
        rope_theta=run.rope_theta,
        rope_scaling=run.rope_scaling,
        norm_eps=run.norm_eps,
        **given,
    )


def resolve(run: R, data: TokenData, tokenizer: PreTrainedTokenizerFast) -> R:
    """The run with all open values filled in and checked against the data.

    Raises HeadloomError: the data or the vocabulary is not the one that the run names, there is too little text, or
    CUDA was asked for and there is none.
    """
    if run.vocab_size not in (None, len(tokenizer)) or data.vocab_size != len(tokenizer):
        raise HeadloomError(
            f"run '{run.name}' has vocab_size {run.vocab_size}, its data {data.vocab_size}, "
            f"the tokenizer {len(tokenizer)}. Leave vocab_size out, and prepare the data with this tokenizer."
        )
    if run.fingerprint not in (None, data.fingerprint):
        raise HeadloomError(
            f"run '{run.name}' was made for data {run.fingerprint[:12]}, but got {data.fingerprint[:12]}. "
            "Give the same text, tokenizer and validation size, or leave fingerprint out."
        )
    part = data.leading.bytes if run.evaluations else run.evaluation_bytes
    if run.evaluation_bytes not in (None, part):
        raise HeadloomError(
            f"run '{run.name}' has evaluation_bytes {run.evaluation_bytes}, but its data were prepared for evaluations "
            f"along the way on {part} bytes. Leave evaluation_bytes out."
        )
    if data.train.rows(run.tokens) < 1:
        raise HeadloomError(
            f"too little text: {len(data.train.ids)} training tokens do not fill one row of {run.tokens}. "
            "Use a shorter context or more text."
        )
    check_device(run.device)
    device = run.device or ("cuda" if torch.cuda.is_available() else "cpu")
    filled = {
        "vocab_size": len(tokenizer),
        "fingerprint": data.fingerprint,
        "evaluation_bytes": part,
        "device": device,
        "threads": run.threads or torch.get_num_threads(),
        "eval_batch_size": run.eval_batch_size or run.micro_batch_size,
    }
    return run.model_copy(update=filled)


def train(
    run: R,
    data: TokenData,
    tokenizer: PreTrainedTokenizerFast,
    folder: str | Path,
    on_progress: OnProgress | None = None,
    *,
    selection: TokenStream | None = None,
    flops_per_token: float | None = None,
    checkpoint_seconds: float | None = 60.0,
    track: str | None = None,
    save_model: bool = False,
    groups: ParameterGroups = hf.parameter_groups,
    make_model: Callable[[R, PreTrainedTokenizerFast], PreTrainedModel] = build,  # type: ignore[assignment]
) -> RunResult:
    """Train one model and measure it.

    Args:
        run: everything that determines the numbers; the same resolved run gives bit-equal losses on one CPU.
        data: from headloom.data.packing.prepare, with this tokenizer.
        folder: new, empty, or the folder of this same run, which continues from its last checkpoint if there is one.
            Its content is described in headloom.records.runs.
        on_progress: called after each step with (step, steps, loss).
        selection: another text to measure, by which learning rates are chosen.
        flops_per_token: training FLOPs per predicted token, for the records.
        checkpoint_seconds: training time between checkpoints in seconds; 0: after every step, None: no checkpoints.
        track: "tensorboard", "trackio" or "wandb" (offline), to follow the run while it is trained.
        save_model: also write model and tokenizer to folder/model.
        groups: function of (model, weight decay) that returns the optimizer's parameter groups.
        make_model: function that builds the model from the resolved run, to train something else than a new Llama.

    Several processes (accelerate launch) share every batch; the first one writes.

    Raises:
        HeadloomError: the call is wrong, or another process is writing the folder; nothing was started.
        RunError: loss or gradient is not finite; the folder then holds failure.json and all metrics up to that step.
        DiskFull: the disk is full; complete files are kept, and the same call continues from them.
    """
    folder, run = Path(folder), resolve(run, data, tokenizer)
    tracking.check(track, folder)
    writes = writes_records()
    with locked(folder) if writes else nullcontext(), saying_when_full(folder), isolated(run):
        model = make_model(run, tokenizer)
        shown = pictures(model)
        before_training = values(model.state_dict(), shown)  # of a run that goes on too: its checkpoint is read later
        rows = TrainingRows(data.train, context=run.tokens, seed=run.seed, count=run.steps * run.batch_size)
        if writes:
            folders.prepare_folder(folder, run.to_dict())
        checkpoint, before = folders.made_before(folder)
        if checkpoint is not None and checkpoint.sharded != sharding.asked_for():
            raise HeadloomError(
                f"'{folder}' holds a checkpoint {'of' if checkpoint.sharded else 'without'} FSDP: go on as the run was "
                f"launched before, or remove {folder / CHECKPOINTS} to start afresh"
            )
        metrics = Metrics(folder, before) if writes else None
        evaluate = partial(
            bits_per_byte,
            model,
            context=run.tokens,
            batch_size=run.eval_batch_size or run.micro_batch_size,
            dtype=torch.bfloat16 if run.dtype == "bfloat16" else None,
        )
        recorder = Recorder(
            run,
            metrics,
            partial(evaluate, data.validation),
            on_progress if writes else None,
            evaluate_part=None if data.leading is data.validation else partial(evaluate, data.leading),
            flops_per_token=flops_per_token,
            before=before,
        )
        caching = model.config.use_cache
        try:
            with scores.paths() as paths, tracking.environment(track, folder):
                paths.update(checkpoint.score_paths if checkpoint else {})
                callbacks: list[TrainerCallback] = [recorder]
                if checkpoint_seconds is not None:
                    callbacks.append(
                        checkpoints.Checkpoints(
                            folder,
                            seconds=checkpoint_seconds,
                            metrics=metrics,
                            score_paths=paths,
                            on_sealed=recorder.start_clock,
                        )
                    )
                place = str(folder / CHECKPOINTS)
                trainer = RunTrainer(run, model, rows, groups=groups, callbacks=callbacks, folder=place, track=track)
                recorder.tell = trainer.log if track else None
                trainer.train(resume_from_checkpoint=str(checkpoint.path) if checkpoint else None)
        except RunError as error:
            if writes and not isinstance(error, DiskFull):
                _fail(folder, run, len(recorder.step_seconds), error)
            raise
        except Exception as error:
            if writes and is_full(error):
                checkpoints.remove_incomplete(folder)  # the one that did not fit
            raise
        finally:
            if metrics is not None:
                metrics.close()
            model.config.use_cache = caching
        chosen_by = evaluate(selection).bits_per_byte if selection is not None else None
        weights = trainer.weights()
        result = _result(run, data, recorder, model, trainer, dict(paths), chosen_by, checksum(weights))
        if writes:
            if save_model:
                whole = trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False)
                _save(whole, weights, tokenizer, folder / MODEL)
            write_pictures(folder, drawn(shown, before_training, weights))
            write_mixes(folder, values(weights, mixing_weights(model)))
            RESULT.write(folder, result)
            checkpoints.remove_all(folder)
        return result


def writes_records() -> bool:
    """Whether this is the first of the processes that share a run."""
    return int(os.environ.get("RANK", "0")) == 0


def _fail(folder: Path, run: Recipe, step: int, error: RunError) -> None:
    FAILURE.write(folder, RunFailure(name=run.name, seed=run.seed, step=step, reason=str(error)))
    checkpoints.remove_all(folder)


def _result(
    run: Recipe,
    data: TokenData,
    recorder: Recorder,
    model: PreTrainedModel,
    trainer: RunTrainer,
    paths: dict[str, int],
    selection_bits: float | None,
    weights: str,
) -> RunResult:
    measured, seconds, optimizer = recorder.final, recorder.step_seconds, trainer.optimizer
    assert measured is not None and optimizer is not None and len(seconds) == run.steps
    warm = min(WARM_STEPS, len(seconds) // 2)
    low, middle, high = _quartiles(seconds[warm:])
    undecayed = [p.numel() for group in optimizer.param_groups if not group["weight_decay"] for p in group["params"]]
    return RunResult(
        name=run.name,
        seed=run.seed,
        steps=run.steps,
        bits_per_byte=measured.bits_per_byte,
        validation_loss=measured.nll_per_token,
        perplexity=measured.perplexity if np.isfinite(measured.perplexity) else None,
        validation_tokens=measured.tokens,
        validation_bytes=measured.bytes,
        validation_text=measured.text,
        notes=data.notes,
        curve=tuple(recorder.curve),
        curve_text=recorder.curve_text,
        selection_bits_per_byte=selection_bits,
        weights=weights,
        parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
        no_decay_parameters=sum(undecayed),
        train_loss=recorder.train_loss,
        tokens=recorder.tokens(run.steps),
        train_seconds=sum(seconds),
        eval_seconds=recorder.eval_seconds,
        step_time_seconds=middle,
        step_time_low=low,
        step_time_high=high,
        warm_steps=warm,
        tokens_per_second=recorder.tokens(1) / middle,
        score_paths=paths,
        fingerprint=data.fingerprint,
        versions=versions(),
        machine=Machine.model_validate(
            ran_on(torch.cuda.get_device_name() if run.device == "cuda" else None, sharded=trainer.is_fsdp_enabled)
        ),
    )


def _save(
    model: PreTrainedModel, weights: dict[str, torch.Tensor], tokenizer: PreTrainedTokenizerFast, folder: Path
) -> None:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the caller has on_progress
    try:
        with whole_folder(folder, "the run goes on from its last checkpoint, or begins again") as partial:
            model.save_pretrained(partial, state_dict=dict(weights))  # which it empties
            tokenizer.save_pretrained(partial)
            shutil.rmtree(folder, ignore_errors=True)  # what this run left before
    finally:
        if shown:
            logging.enable_progress_bar()


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


@contextmanager
def isolated(run: Recipe) -> Iterator[None]:
    """Inside, PyTorch uses the run's number of threads. Afterwards the caller's number of threads and random states
    (which the Trainer seeds) are restored."""
    threads, python, numpy = torch.get_num_threads(), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if run.device == "cuda" else []):
        torch.manual_seed(run.seed)
        torch.set_num_threads(run.threads or threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            random.setstate(python)
            np.random.set_state(numpy)
