"""Hugging Face's Trainer, set up so that a run depends on its Recipe only."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from headloom.core.errors import HeadloomError, RunError
from headloom.core.machine import world_size
from headloom.data.packing import TrainingRows
from headloom.evaluate.bits import BitsPerByte
from headloom.records.metrics import HeldOutLine, Line, Metrics, TrainLine
from headloom.records.runs import CurvePoint
from headloom.train import sharding
from headloom.train.config import Recipe

ParameterGroups = Callable[[torch.nn.Module, float], list[dict[str, Any]]]
OnProgress = Callable[[int, int, float], None]


def rate_factor(step: int, *, warmup_steps: int, steps: int, final: float) -> float:
    """The learning rate of optimizer step `step` (from 0) as a share of the peak.

    Linear warm-up (step+1)/warmup_steps, reaching the peak in its last step (no step is wasted at rate 0), then half
    a cosine from the peak to `final`, which the last step has.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    progress = (step - warmup_steps + 1) / max(1, steps - warmup_steps)
    return final + (1.0 - final) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))


def training_arguments(run: Recipe, folder: str, track: str | None = None) -> TrainingArguments:
    """The Trainer's arguments, with everything that affects the result set explicitly.

    The Trainer writes checkpoints to `folder`. With several processes (accelerate launch), each takes its share of
    every batch.
    """
    world = world_size()
    if run.micro_batch_size % world:
        raise HeadloomError(
            f"{world} processes cannot share the {run.micro_batch_size} rows of a forward pass evenly: "
            "give a batch_size that they divide, or fewer accumulation_steps"
        )
    return TrainingArguments(
        output_dir=folder,
        run_name=run.name,
        project="headloom",
        use_cpu=run.device == "cpu",
        seed=run.seed,
        bf16=run.dtype == "bfloat16",
        max_steps=run.steps,
        per_device_train_batch_size=run.micro_batch_size // world,
        gradient_accumulation_steps=run.accumulation_steps,
        average_tokens_across_devices=True,  # the loss is a mean over all tokens of a step, however they are cut
        train_sampling_strategy="sequential",  # TrainingRows already stands in the run's order
        dataloader_drop_last=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=run.device == "cuda",
        remove_unused_columns=False,
        max_grad_norm=run.clip,
        learning_rate=run.learning_rate,
        weight_decay=run.weight_decay,
        adam_beta1=run.betas[0],
        adam_beta2=run.betas[1],
        adam_epsilon=run.adam_eps,
        logging_strategy="steps",
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_strategy="no",  # Checkpoints asks for them
        eval_strategy="no",
        activation_checkpointing=run.checkpoint_activations,
        activation_checkpointing_kwargs={"use_reentrant": False} if run.checkpoint_activations else None,
        torch_compile=run.compile is not None,
        torch_compile_backend=run.compile,
        ddp_find_unused_parameters=False,
        report_to=track or "none",
        disable_tqdm=True,
    )


class RunTrainer(Trainer):
    """The Trainer with our optimizer groups and schedule; the loop itself is Hugging Face's."""

    def __init__(
        self,
        run: Recipe,
        model: PreTrainedModel,
        rows: TrainingRows,
        *,
        groups: ParameterGroups,
        callbacks: list[TrainerCallback],
        folder: str,
        track: str | None = None,
    ) -> None:
        self.run, self._groups = run, groups
        arguments = training_arguments(run, folder, track)
        arguments._n_gpu = min(1, arguments.n_gpu)  # the Trainer would multiply the batch size by the number of GPUs
        super().__init__(model=model, args=arguments, train_dataset=rows, data_collator=collate, callbacks=callbacks)
        self.remove_callback(PrinterCallback)

    def create_accelerator_and_postprocess(self) -> None:
        """As the Trainer does it, and with FSDP2 over CPU processes if that was asked for."""
        sharding.allow_cpus()
        super().create_accelerator_and_postprocess()

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """AdamW over the parameter groups of headloom.hf: mixes, norms and biases have no weight decay."""
        if self.optimizer is None:
            target = self.model if model is None else model
            assert target is not None
            self.optimizer = adamw(self.run, self._groups(target, self.run.weight_decay))
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> LRScheduler:
        """Warm-up and cosine of `rate_factor`."""
        if self.lr_scheduler is None:
            run, target = self.run, self.optimizer if optimizer is None else optimizer
            assert target is not None
            self.lr_scheduler = LambdaLR(
                target,
                lambda step: rate_factor(
                    step, warmup_steps=run.warmup_steps, steps=num_training_steps, final=run.final_learning_rate
                ),
            )
            self._created_lr_scheduler = True
        return self.lr_scheduler

    def weights(self) -> dict[str, torch.Tensor]:
        """The model's whole state. If it is sharded over processes: gathered in the first one, empty in the others."""
        assert self.model is not None
        if not self.is_fsdp_enabled:
            return dict(self.model.state_dict())
        gathered = dict(self.accelerator.get_state_dict(self.model_wrapped))
        for name, source in self.accelerator.unwrap_model(self.model).all_tied_weights_keys.items():
            if name in gathered:
                gathered[name] = gathered[source]  # one tensor again, so that it is written once
        return gathered

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """0: FLOPs are counted by headloom.bench from the built module, not estimated at every step."""
        return 0


def adamw(run: Recipe, groups: list[dict[str, Any]]) -> torch.optim.AdamW:
    """A run's optimizer. A group without "weight_decay" has none."""
    return torch.optim.AdamW(
        groups, lr=run.learning_rate, betas=run.betas, eps=run.adam_eps, weight_decay=0.0, fused=True
    )


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Stack rows of equal length into (B, T)."""
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


class Recorder(TrainerCallback):
    """Records each step, validates, measures the time, and stops a run whose numbers are no longer finite.

    The clock runs from the end of one step's records to the end of the next step: loading data, forward, backward and
    update count; records, validation, checkpoints and the caller's progress do not.

    Args:
        metrics: None in the processes of a run that do not write.
        evaluate: measures the whole validation text, at the end.
        evaluate_part: measures the part of it that is read during the run; None if that is the whole text.
        flops_per_token: training FLOPs per predicted token, for the records.
        before: the metrics of earlier steps, if a run continues.
    """

    def __init__(
        self,
        run: Recipe,
        metrics: Metrics | None,
        evaluate: Callable[[], BitsPerByte],
        on_progress: OnProgress | None,
        *,
        evaluate_part: Callable[[], BitsPerByte] | None = None,
        flops_per_token: float | None = None,
        before: Sequence[Line] = (),
    ) -> None:
        self.run, self._metrics, self._evaluate, self._on_progress = run, metrics, evaluate, on_progress
        self._evaluate_part, self._curve_steps = evaluate_part, frozenset(run.evaluation_steps)
        self._flops_per_token = flops_per_token
        made = [line for line in before if isinstance(line, TrainLine)]
        ends = [0.0, *(line.seconds for line in made)]
        self.step_seconds: list[float] = [end - start for start, end in itertools.pairwise(ends)]
        self.train_loss = made[-1].loss if made else math.nan
        self.curve: list[CurvePoint] = [line.point for line in before if line.kind == "curve"]
        self.curve_text = ""
        self.eval_seconds = 0.0
        self.final: BitsPerByte | None = None
        self.tell: Callable[[dict[str, float]], None] | None = None  # what validations are told to besides
        self._mark = 0.0
        self._tokens_a_step = run.batch_size * (run.tokens - 1)

    def tokens(self, step: int) -> int:
        """Tokens predicted in `step` optimizer steps."""
        return step * self._tokens_a_step

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the clock."""
        self.start_clock()

    def start_clock(self) -> None:
        """Start measuring a step: the time before does not count as training time."""
        self._mark = self._now()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Stop the clock."""
        self.step_seconds.append(self._now() - self._mark)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Record the step. The Trainer's final summary holds no step's loss and is ignored."""
        if logs is None or "loss" not in logs:
            return
        step, loss, norm = state.global_step, float(logs["loss"]), float(logs["grad_norm"])
        rate, seconds = float(logs["learning_rate"]), sum(self.step_seconds)
        for what, value in (("loss", loss), ("gradient norm", norm)):
            if not math.isfinite(value):
                raise RunError(
                    f"run '{self.run.name}' stopped at step {step} of {self.run.steps}: "
                    f"its {what} is {value} at learning rate {rate:g}. "
                    f"Use a lower learning rate (below {self.run.learning_rate:g}), "
                    "a longer warm-up, or a smaller clip."
                )
        self.train_loss = loss
        self._write(TrainLine(**self._spent(step, seconds), loss=loss, learning_rate=rate, grad_norm=norm))
        self._validate(step, seconds)
        if self._on_progress is not None:
            self._on_progress(step, self.run.steps, loss)
        self.start_clock()

    def _write(self, line: Line) -> None:
        if self._metrics is not None:
            self._metrics.write(line)

    def _spent(self, step: int, seconds: float) -> dict[str, Any]:
        """The fields with which every line of the metrics begins."""
        tokens = self.tokens(step)
        flops = None if self._flops_per_token is None else tokens * self._flops_per_token
        return {"step": step, "tokens": tokens, "flops": flops, "seconds": seconds}

    def _validate(self, step: int, seconds: float) -> None:
        """Measure a point of the curve if one is due, and the whole text at the end."""
        last, part = step == self.run.steps, self._evaluate_part
        if last:
            start = self._now()
            self.final = self._measured("eval", self._evaluate, step, seconds)
            self.eval_seconds = self._now() - start
        if step in self._curve_steps:
            whole = self.final
            again = part or (self._evaluate if whole is None else lambda: whole)
            self.curve_text = self._measured("curve", again, step, seconds).text

    def _measured(
        self, kind: Literal["curve", "eval"], evaluate: Callable[[], BitsPerByte], step: int, seconds: float
    ) -> BitsPerByte:
        """Measure and record. Raises RunError if the result is not finite."""
        measured = evaluate()
        if not math.isfinite(measured.nll_per_token):
            raise RunError(
                f"run '{self.run.name}' stopped at step {step} of {self.run.steps}: "
                f"its validation loss is {measured.nll_per_token}. "
                f"Use a lower learning rate (below {self.run.learning_rate:g}) or a longer warm-up."
            )
        bits, loss = measured.bits_per_byte, measured.nll_per_token
        if self.tell is not None:
            prefix = "eval_" if kind == "eval" else "eval_curve_"
            self.tell({f"{prefix}bits_per_byte": bits, f"{prefix}loss": loss})
        line = HeldOutLine(kind=kind, **self._spent(step, seconds), bits_per_byte=bits, validation_loss=loss)
        self._write(line)
        if kind == "curve":
            self.curve.append(line.point)
        return measured

    def _now(self) -> float:
        if self.run.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()
