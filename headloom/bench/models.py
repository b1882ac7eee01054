"""Whole models: ours, and the transformers' own that they stand in for, at any size that fits memory.

Modes: "backward" is the forward and backward pass of a batch; "step" also clips and updates by AdamW, as in a
comparison's runs; "train" is that step inside the loop that `headloom train` runs, and for the transformers' own model
in their Trainer (`headloom.bench.pace`). Weights are float32, products bfloat16 where that is the setting's type
(autocast).
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil
import torch
from torch import nn

from headloom.bench.asked import ModelSize, Named, check_counts, check_models
from headloom.bench.layers import COMPILED, first_compiled_call, use_of_peak
from headloom.bench.setting import Peak, Setting
from headloom.bench.speed import Timing, interleaved
from headloom.bench.subjects import FACTOR
from headloom.core import heap
from headloom.core.errors import HeadloomError
from headloom.costs.count import model_flops
from headloom.ops.scores import paths

GIB = 2**30
STATE = {"backward": (4, 4), "step": (16, 0), "train": (4, 12)}
"""Modes, and the bytes that a parameter takes all the time and while its model is at work: weight, gradient and AdamW's
two moments in float32."""
UNKNOWN = {"full": None, "exact": None}
ROOM = 0.9
"""Share of the free memory that is used: a heap that gradients come from and go back to has holes (at 350M and 1.3B a
process took up to 9 % more than `Candidate.bytes` says)."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A model to be built: how, whether it is the transformers' own, its parameters, forward FLOPs of one sequence, and
    the bytes that it takes: those it holds all the time, and those it holds while it is at work."""

    label: str
    build: Callable[..., Any]
    original: bool
    parameters: int
    flops: Mapping[str, int | None]
    saved: int

    def held(self, mode: str) -> int:
        return STATE[mode][0] * self.parameters

    def during(self, mode: str) -> int:
        return STATE[mode][1] * self.parameters + self.saved

    def bytes(self, mode: str) -> int:
        return self.held(mode) + self.during(mode)


def steps(
    variants: Sequence[Named],
    shapes: Sequence[ModelSize],
    setting: Setting,
    *,
    tokens: Sequence[int],
    batch_sizes: Sequence[int],
    modes: Sequence[str] = ("step",),
    original: bool = False,
    compile: str | None = None,
    peak: Peak | None = None,
    available: int | None = None,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of times, and what was left out with the reason; ratios are over the first variant, None where that one is
    left out.

    Args:
        tokens: lengths (empty: each shape's own).
        modes: of `headloom.bench.asked.MODEL_MODES`. compile: as for `headloom.bench.layers.speed`, not for "train".
        original: also the transformers' own model, with the first variant's weights where they fit.
        available: bytes that may be used (None: what is free now). Models that fit together take turns; where only
            single ones fit they run one after the other ("interleaved": false); one that does not fit is left out.
    """
    check_counts({"tokens": tokens, "batch-size": batch_sizes})
    check_models(modes, compiled=compile is not None, dtype=setting.dtype)
    rows: list[dict[str, Any]] = []
    skipped: list[dict[str, Any]] = []
    points = [(s, T, B, mode) for s in shapes for T in tokens or [s.tokens] for B in batch_sizes for mode in modes]
    for shape, T, B, mode in points:
        setting.say(f"{mode} of a model, {shape.name}, {T:,} tokens x {B}")
        point = {"mode": mode, "size": shape.name, "tokens": T, "batch_size": B}

        def fits(candidate: Candidate, mode: str = mode, point: dict[str, Any] = point) -> bool:
            room = _room(setting, available)
            if candidate.bytes(mode) <= room:
                return True
            reason = f"needs {candidate.bytes(mode) / GIB:.1f} GiB, {room / GIB:.1f} available"
            setting.say(f"{candidate.label} left out: {reason}")
            skipped.append({"variant": candidate.label, **point, "reason": reason})
            setting.keep([], skipped[-1:])
            return False

        fitting = [candidate for candidate in _candidates(variants, shape, T, B, original) if fits(candidate)]
        if not fitting:
            continue
        if peak is not None:
            peak.measure()
        held = sum(candidate.held(mode) for candidate in fitting)
        together = held + max(candidate.during(mode) for candidate in fitting) <= _room(setting, available)
        timings: dict[str, Timing] = {}
        for group in [fitting] if together else [[candidate] for candidate in fitting]:
            if not together:
                if not fits(group[0]):  # those before it have left less than there was
                    continue
                setting.say(f"{group[0].label} alone, since not all fit memory together")
            if mode == "train":
                timed, about = _in_training(group, shape, T, B, setting)
            else:
                timed, about = _timed(group, shape, T, B, setting, compile, updates=mode == "step")
            torch.compiler.reset()
            _give_back(setting)
            timings |= timed
            usual, done = timings.get(variants[0].label), len(rows)
            for candidate in group:
                for name in (candidate.label, candidate.label + COMPILED):
                    if name in timed:
                        timing = timed[name]
                        row = {
                            "variant": candidate.label,
                            **point,
                            "layers": shape.arguments["num_layers"],
                            "parameters": candidate.parameters,
                            "seconds": timing.to_dict(),
                            "tokens_per_second": B * T / timing.median,
                            "ratio": timing.over(usual).spread() if usual else None,
                            "ratio_to": variants[0].label,
                            "ratio_to_own": timing.over(timed[candidate.label]).spread(),
                            "interleaved": together,
                            **{f"flops_{kind}": n and n * FACTOR[mode] * B for kind, n in candidate.flops.items()},
                            **about[name],
                        }
                        rows.append(row)
            use_of_peak(rows, peak)
            setting.keep(rows[done:])
    return rows, skipped


def _timed(
    group: Sequence[Candidate],
    shape: ModelSize,
    tokens: int,
    batch: int,
    setting: Setting,
    backend: str | None,
    updates: bool,
) -> tuple[dict[str, Timing], dict[str, dict[str, Any]]]:
    """Timings of models that are in memory together, by label."""
    calls: dict[str, Callable[[], object]] = {}
    about: dict[str, dict[str, Any]] = {}
    generator = torch.Generator().manual_seed(setting.seed)
    ids_BT = torch.randint(shape.arguments["vocab_size"], (batch, tokens), generator=generator).to(setting.device)
    given: dict[str, Any] = {"batches": [{"input_ids": ids_BT, "labels": ids_BT}], "dtype": setting.dtype}
    for candidate in group:
        model: Any = candidate.build().to(setting.device).train()
        given["optimizer"] = optimizer_of(model) if updates else None
        step = calls[candidate.label] = training_step(model, **given)
        with paths() as counted:
            step()
        about[candidate.label] = {"paths": dict(counted), "compiled": False}
        if backend:
            setting.say(f"compiling {candidate.label}")
            name = candidate.label + COMPILED
            made = torch.compile(model, backend=backend, dynamic=False)
            step = calls[name] = training_step(model, **given, call=made)
            about[name] = {**about[candidate.label], "compiled": True, **first_compiled_call(step)}
    return interleaved(calls, repeats=setting.repeats, warmup=setting.warmup, device=setting.device), about


def _in_training(
    group: Sequence[Candidate], shape: ModelSize, tokens: int, batch: int, setting: Setting
) -> tuple[dict[str, Timing], dict[str, dict[str, Any]]]:
    """As `_timed`, of a step in chunks of each one's training loop, which take turns."""
    from headloom.bench.pace import Pace

    settings = {"device": setting.device, "dtype": setting.dtype, "threads": setting.threads}
    pace = Pace(vocab_size=shape.arguments["vocab_size"], tokens=tokens, batch_size=batch, **settings)
    models = {candidate.label: candidate.build() for candidate in group}
    samples: dict[str, list[float]] = {label: [] for label in models}
    about: dict[str, dict[str, Any]] = {}
    for _ in range(setting.repeats):
        for candidate in group:
            loop = pace.theirs if candidate.original else pace.ours
            with paths() as counted:
                samples[candidate.label].append(loop(models[candidate.label]))
            about[candidate.label] = {"paths": dict(counted), "compiled": False}
    return {label: Timing.of(values) for label, values in samples.items()}, about


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as in a comparison's runs."""
    from headloom.hf import parameter_groups

    return torch.optim.AdamW(parameter_groups(model, 0.1), lr=1e-4, betas=(0.9, 0.95), fused=True)


def training_step(
    model: nn.Module,
    *,
    optimizer: torch.optim.Optimizer | None,
    batches: Sequence[Mapping[str, torch.Tensor]],
    dtype: str | None = "float32",
    clip: float = 1.0,
    call: Any = None,
) -> Callable[[], object]:
    """A call that makes one step of `model` from the batches that it accumulates over, or, without an optimizer, their
    passes alone. Its forward is `call` (compiled, say; None: itself)."""
    forward = model if call is None else call
    device = next(model.parameters()).device.type

    def step() -> None:
        for batch in batches:
            with torch.autocast(device, dtype=torch.bfloat16, enabled=dtype == "bfloat16"):
                loss = forward(**batch, use_cache=False).loss
            loss.backward()
        if optimizer is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
        model.zero_grad()

    return step


def _candidates(
    variants: Sequence[Named], shape: ModelSize, tokens: int, batch: int, original: bool
) -> list[Candidate]:
    """The models of one point, counted on the meta device."""
    from headloom.hf import build_model

    found: list[Candidate] = []
    for named in variants:

        def build(device: str | None = None, named: Named = named) -> Any:
            try:
                return build_model(
                    (named.mechanism, dict(named.options)), max_positions=tokens, device=device, **shape.arguments
                )
            except HeadloomError as error:
                raise HeadloomError(f"{named.label}: {error}") from None

        found.append(_candidate(named.label, build, build("meta"), tokens, batch))
    if original:
        first = found[0].build

        def build_original(device: str | None = None) -> Any:
            return original_of(first(device))

        ours, theirs = first("meta"), build_original("meta")
        same = _shapes(ours) == _shapes(theirs)  # then it is the same model, and costs the same
        label = type(theirs).__name__
        flops = found[0].flops if same else UNKNOWN
        found.append(_candidate(label, build_original, theirs, tokens, batch, flops, original=True))
    return found


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def _candidate(
    label: str,
    build: Callable[..., nn.Module],
    meta: nn.Module,
    tokens: int,
    batch: int,
    flops: Mapping[str, int | None] | None = None,
    *,
    original: bool = False,
) -> Candidate:
    parameters = sum(p.numel() for p in meta.parameters())
    if flops is None:
        flops = {name: model_flops(meta, tokens, name) for name in ("full", "exact")}
    return Candidate(label, build, original, parameters, flops, batch * saved_bytes(meta, tokens))


def original_class(model: Any) -> type:
    """The transformers' class whose attention `model` replaced: LlamaForCausalLM."""
    return model.family.head_classes()["AutoModelForCausalLM"]


def original_of(model: Any) -> Any:
    """The transformers' own model of the same config; `model`'s weights, where names and shapes are the same."""
    values = model.config.to_dict()
    values.pop("headloom")
    config = model.family.config_class().from_dict(values)
    device = next(model.parameters()).device
    with device:
        made = original_class(model)(config)
    ours, theirs = model.state_dict(), made.state_dict()
    fitting = {name: tensor for name, tensor in ours.items() if name in theirs and theirs[name].shape == tensor.shape}
    if device.type != "meta":
        made.load_state_dict(fitting, strict=False)
    return made


def saved_bytes(model: Any, tokens: int) -> int:
    """Bytes of what a training step of one sequence keeps for the backward pass, counted on the meta device: every
    saved tensor's storage once, without the weights, and the loss's three copies of the logits."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    kept: dict[int, Any] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return x

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        logits = model(input_ids=ids, use_cache=True).logits
    return sum(storage.nbytes() for storage in kept.values()) + 3 * 4 * logits.numel()


def _give_back(setting: Setting) -> None:
    """Return the memory of dropped models, so that what is free can be asked: allocators keep it for themselves."""
    gc.collect()  # models refer to themselves
    if setting.device == "cuda":
        torch.cuda.empty_cache()
    else:
        heap.give_back()


def _room(setting: Setting, available: int | None) -> int:
    return int(_free(setting) * ROOM) if available is None else available


def _free(setting: Setting) -> int:
    if setting.device == "cuda":
        return torch.cuda.mem_get_info()[0]
    return psutil.virtual_memory().available
