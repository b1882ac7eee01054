"""One training run from configuration to result."""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import logging

from headloom import hf
from headloom.core.errors import HeadloomError, RunError
from headloom.data.packing import TokenData, TrainingRows
from headloom.evaluate.bits import bits_per_byte
from headloom.ops import scores
from headloom.train import records
from headloom.train.config import Recipe, RunConfig
from headloom.train.records import Metrics, RunResult, write_json
from headloom.train.trainer import ParameterGroups, Progress, Recorder, RunTrainer

R = TypeVar("R", bound=Recipe)

WARM_STEPS = 5


def build(run: RunConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """The model of a resolved run: a Llama with the run's attention, every tensor initialised by (seed, name)."""
    specs = [(spec.mechanism, dict(spec.options)) for spec in run.specs]
    return hf.build_model(
        specs[0] if len(specs) == 1 else specs,
        vocab_size=run.vocab_size,
        hidden_size=run.hidden_size,
        num_layers=run.num_layers,
        num_heads=run.num_heads,
        num_kv_heads=run.num_kv_heads,
        head_dim=run.head_dim,
        intermediate_size=run.intermediate_size,
        max_positions=run.tokens,
        tie_embeddings=run.tie_embeddings,
        rope_theta=run.rope_theta,
        rope_scaling=run.rope_scaling,
        norm_eps=run.norm_eps,
        seed=run.seed,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )


def resolve(run: R, data: TokenData, tokenizer: PreTrainedTokenizerFast) -> R:
    """The run with every value that was left open filled in, checked against the data.

    Raises HeadloomError: other data or another vocabulary than the run names, too little text, no CUDA where it is
    asked for.
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
    if data.train.rows(run.tokens) < 1:
        raise HeadloomError(
            f"too little text: {len(data.train.ids)} training tokens do not fill one row of {run.tokens}. "
            "Use a shorter context or more text."
        )
    device = run.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise HeadloomError(
            f"run '{run.name}' asks for device 'cuda', but torch sees none. Use device 'cpu', or leave it out."
        )
    filled = {
        "vocab_size": len(tokenizer),
        "fingerprint": data.fingerprint,
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
    on_progress: Progress | None = None,
    *,
    save_model: bool = False,
    groups: ParameterGroups = hf.parameter_groups,
    make_model: Callable[[R, PreTrainedTokenizerFast], PreTrainedModel] = build,  # type: ignore[assignment]
) -> RunResult:
    """Train one model and measure it.

    Args:
        run: everything that decides the numbers; the same resolved run gives bit-equal losses on one CPU.
        data: from headloom.data.prepare, with this tokenizer.
        folder: new, empty, or left by this very run, which then starts afresh. Filled as headloom.train.records says.
        on_progress: called after each step with (step, steps, loss).
        save_model: also write model and tokenizer to folder/model.
        groups: the optimizer's groups from (model, weight decay).
        make_model: makes the model from the resolved run, to train something other than a new Llama.

    Raises:
        HeadloomError: the call is wrong; nothing was started.
        RunError: loss or gradient is not finite; the folder then holds failure.json and all metrics up to that step.
    """
    folder, run = Path(folder), resolve(run, data, tokenizer)
    with _isolated(run):
        model = make_model(run, tokenizer)
        rows = TrainingRows(data.train, context=run.tokens, seed=run.seed, count=run.steps * run.batch_size)
        records.open_folder(folder, run.to_dict())
        metrics = Metrics(folder / records.METRICS)
        evaluate = partial(
            bits_per_byte,
            model,
            data.validation,
            context=run.tokens,
            batch_size=run.eval_batch_size or run.micro_batch_size,
            dtype=torch.bfloat16 if run.dtype == "bfloat16" else None,
        )
        recorder = Recorder(run, metrics, evaluate, on_progress)
        caching = model.config.use_cache
        try:
            with tempfile.TemporaryDirectory() as scratch, scores.paths() as paths:
                trainer = RunTrainer(run, model, rows, groups=groups, recorder=recorder, scratch=scratch)
                trainer.train()
        except RunError as error:
            failure = {"name": run.name, "seed": run.seed, "step": len(recorder.step_seconds), "reason": str(error)}
            write_json(folder / records.FAILURE, failure)
            raise
        finally:
            metrics.close()
            model.config.use_cache = caching
        result = _result(run, data, recorder, model, trainer.optimizer, dict(paths))
        if save_model:
            _save(trainer.accelerator.unwrap_model(model, keep_fp32_wrapper=False), tokenizer, folder / "model")
        write_json(folder / records.RESULT, result.to_dict())
        return result


def _result(
    run: Recipe,
    data: TokenData,
    recorder: Recorder,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer | None,
    paths: dict[str, int],
) -> RunResult:
    measured, seconds = recorder.final, recorder.step_seconds
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
        versions=records.versions(),
        machine=records.machine(torch.cuda.get_device_name() if run.device == "cuda" else None),
    )


def _save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # the caller has on_progress
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if shown:
            logging.enable_progress_bar()


def _quartiles(values: list[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


@contextmanager
def _isolated(run: Recipe) -> Iterator[None]:
    """Threads as the run says; afterwards the caller's threads and random states, which the Trainer seeds, are back."""
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
