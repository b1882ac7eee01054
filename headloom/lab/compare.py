"""`hl.compare`: train every variant with every seed at equal parameters, and say what differs by more than noise.

It is a study with defaults: `headloom.lab.spec.study` is about studies, `headloom.lab.run.runner` about their folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError
from headloom.lab.plan.plan import Plan, make_plan
from headloom.lab.run.folder import open_folder, refuse_other
from headloom.lab.run.growth import differing_specs
from headloom.lab.run.progress import Progress, told
from headloom.lab.run.runner import Comparison, Interrupted, Runner
from headloom.lab.spec.resolve import resolve, shape_of
from headloom.lab.spec.resolved import StudySpec, identity
from headloom.lab.spec.sizes import Size, get_size
from headloom.lab.spec.study import Budget, EngineOptions, WrittenStudy
from headloom.lab.spec.variants import Variant, check_variants, parse_variants
from headloom.records.manifest import STUDY_YAML, Manifest
from headloom.train.config import EVALUATIONS, check_device
from headloom.train.tracking import check_name

if TYPE_CHECKING:
    from headloom.data import Corpus

__all__ = ["Comparison", "Interrupted", "compare", "make_spec", "run_study"]

EQUAL_PARAMETERS = Budget(match="parameters", knob=("F",))


def compare(
    variants: str | Sequence[str] | None = None,
    *,
    settings: Sequence[str] = (),
    size: str = "tiny",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    config: str | Path | None = None,
    steps: int | None = None,
    seeds: int = 4,
    data: str | Path = "stdlib",
    text_column: str | None = None,
    tokenizer: str | Path = "bytes",
    tokens: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    evaluations: int = EVALUATIONS,
    threads: int | None = None,
    device: str = "auto",
    dtype: str = "float32",
    compile: bool = False,
    track: str | None = None,
    out: str | Path | None = None,
    progress: Progress | bool | None = None,
    report: bool = True,
    engine: str = "local",
) -> Comparison:
    """Compare attention mechanisms on one text at equal parameters and equal steps.

    Args:
        variants: "mha,iha:pseudo_heads=2" or a list of such texts; None: the four of defaults.toml.
        settings: ["iha.pseudo_heads=4"]: options for every variant of that name.
        size: a name of `headloom.lab.spec.sizes`; the reference keeps its feed-forward width, the others' is turned.
        layers, width, heads: of the model; None: the size's, or those of `config`.
        config: a Hugging Face config of a decoder (a folder, or its JSON): every variant is that model with another
            attention, and what its options leave open (key/value heads, windows, biases) is the config's.
        steps, tokens, batch_size, learning_rate: steps, context, sequences a step, peak rate; None: the size's.
        seeds: how many seeds; from two on there are intervals.
        evaluations: validations along every run, besides the one at its end (0: none).
        data, text_column, tokenizer: as `headloom.data.load_corpus` and `make_tokenizer` take them.
        threads: processor threads of a run; None: the size's (tiny: 1), or all this process may use.
        device: "auto" (CUDA where there is one), "cpu" or "cuda".
        dtype: "float32", or "bfloat16" (autocast over float32 weights). compile: models by torch.compile (inductor).
        track: "tensorboard", "trackio" or "wandb" (offline).
        out: the study's folder; runs that it holds already and that are asked for again are used again. None:
            headloom-compare here, or the first free number after it.
        progress: None shows it on stderr (a bar on a terminal, else a line a run), False does not; or one of your own,
            a `headloom.lab.run.progress.Progress`, which is told what happens. report: also report.html and figures/.
        engine: "local" (a process for each run), or "inline" (this process, for a debugger).

    Raises:
        HeadloomError: the call is wrong; nothing was trained.
        Interrupted: Ctrl-C; what was finished is kept.

    A run that fails is recorded with its reason and the others go on: see `Comparison.failed`.
    """
    if out is not None and not isinstance(out, str | Path):
        raise HeadloomError(f"out must be a folder's path, not {out!r}")
    progress = told(progress)
    with progress:
        progress.stage("reading the call")
        if out is not None:
            refuse_other(Path(out), lambda _: {})
        make_study = partial(
            comparison_study,
            size=size,
            seeds=seeds,
            data=_data_name(data),
            text_column=text_column,
            tokenizer=str(tokenizer),
            threads=threads,
            steps=steps,
            tokens=tokens,
            batch_size=batch_size,
            learning_rate=learning_rate,
            evaluations=evaluations,
            engine=engine,
            track=track,
            backbone={"layers": layers, "width": width, "heads": heads},
            config=None if config is None else str(config),
            device=device,
            dtype=dtype,
            compile="inductor" if compile else None,
        )
        # what is wrong besides the variants is said before torch is imported for theirs
        trial = make_study([Variant("any")])
        check_variants(variants, settings)
        check_places(trial)
        if config is None:
            shape_of(trial, get_size(size), {}, "the model")
        parsed = parse_variants(variants, settings)
        study = make_study(parsed)
        spec = resolve(study, kind="compare", variants=parsed)
        return _run(study, spec, compare_command(spec, track), out, "headloom-compare", progress, report)


def run_study(
    study: WrittenStudy,
    *,
    command: str | None = None,
    out: str | Path | None = None,
    progress: Progress | bool | None = None,
    report: bool = True,
) -> Comparison:
    """Run a study, or what is left of it, in its folder.

    Args:
        command: the command line that makes it; None: its own study.yaml, in its folder.
        out: None: the study's name here, or the first free number after it.
    """
    progress = told(progress)
    with progress:
        progress.stage("reading the study")
        if out is not None:
            refuse_other(Path(out), lambda _: {})
        check_places(study)
        return _run(study, resolve(study), command, out, study.name, progress, report)


def check_places(study: WrittenStudy) -> None:
    """Refuse what can be known to be wrong from names, paths and this machine, before anything is read or built."""
    from headloom.data import check_corpus, check_tokenizer

    get_size(study.size)
    check_name(study.engine.track)
    if study.config is not None and not Path(study.config).expanduser().exists():
        raise HeadloomError(
            f"'{study.config}' holds no Hugging Face config: it does not exist. Give a folder with a config.json, or "
            "such a JSON file"
        )
    check_corpus(study.data, text_column=study.text_column)
    check_tokenizer(study.tokenizer)
    check_device(None if study.device == "auto" else study.device)


def _run(
    study: WrittenStudy,
    spec: StudySpec,
    command: str | None,
    out: str | Path | None,
    default: str,
    progress: Progress,
    report: bool,
) -> Comparison:
    progress.stage("reading the text and matching budgets")
    if out is not None:
        refuse_other(Path(out), lambda held: differing_specs(held, spec))
    plan = make_plan(spec, lambda corpus: _same_text(out, corpus))
    for note in plan.data.notes:
        progress.note(note)
    resolved = plan.resolved
    study_hash = identity(resolved)
    folder = open_folder(out, study_hash, resolved, default=default)
    command = command or f"headloom study run {shlex.quote(str(folder / STUDY_YAML))}"
    runner = Runner(plan, folder, study_hash, resolved, study, command, _notes(plan), progress, report)
    return runner.run()


def _same_text(out: str | Path | None, corpus: Corpus) -> None:
    """Refuse a folder with a study of another text before this one is tokenised."""

    def differing(held: Manifest) -> dict[str, dict[str, Any]]:
        there, here = held.resolved.data.corpus, corpus.fingerprint
        return {} if there == here else {"data": {"there": there[:12], "here": here[:12]}}

    if out is not None:
        refuse_other(Path(out), differing)


def make_spec(variants: list[Variant], size: Size, **settings: Any) -> StudySpec:
    """The resolved comparison of parsed variants; None means the size's own value. As `comparison_study`."""
    return resolve(comparison_study(variants, size.name, **settings), kind="compare", variants=variants)


def comparison_study(
    variants: Sequence[Variant],
    size: str,
    *,
    seeds: int,
    data: str,
    tokenizer: str,
    threads: int | None,
    text_column: str | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    evaluations: int = EVALUATIONS,
    engine: str = "local",
    track: str | None = None,
    **same: Any,
) -> WrittenStudy:
    """A comparison as a study: equal parameters by the feed-forward width, equal steps, one learning rate.

    same: other keys of a study, as they are.
    """
    get_size(size)
    if type(seeds) is not int or not 1 <= seeds <= 1000:
        raise HeadloomError(f"seeds must be a number of seeds from 1 to 1000, not {seeds!r}")
    try:
        place = EngineOptions(name=engine, track=track)  # type: ignore[arg-type]
    except ValueError:
        raise HeadloomError(f"engine must be local or inline, not '{engine}'") from None
    written: dict[str, Any] = {
        "name": "headloom-compare",
        "variants": tuple(variant.text for variant in variants),
        "budgets": (EQUAL_PARAMETERS,),
        "size": size,
        "seeds": seeds,
        "statistics": seeds > 1,
        "data": data,
        "text_column": text_column,
        "tokenizer": tokenizer,
        "threads": threads,
        "steps": steps,
        "tokens": tokens,
        "batch_size": batch_size,
        "learning_rates": None if learning_rate is None else (learning_rate,),
        "evaluations": evaluations,
        "engine": place,
        **same,
    }
    try:
        return WrittenStudy(**written)
    except HeadloomError as error:  # the study's keys are this function's arguments, but for this one
        line = str(error).removeprefix("study: ").replace("entry 1 of learning_rates:", "learning_rate:")
        line = line.removeprefix("backbone.")
        raise HeadloomError(line) from None


def compare_command(spec: StudySpec, track: str | None = None) -> str:
    """The command line that makes a comparison, with nothing left to a default. track: as --track, which is no part of
    what is compared."""
    shape, rate, size = spec.variants[0].shape, spec.learning_rates[0], get_size(spec.size)
    own = {"layers": shape.num_layers, "width": shape.hidden_size, "heads": shape.num_heads}
    usual = {"layers": size.num_layers, "width": size.hidden_size, "heads": size.num_heads}
    arguments = {
        "--variants": ",".join(Variant(variant.mechanism, variant.options).text for variant in spec.variants),
        "--size": spec.size,
        **({} if spec.config is None else {"--config": spec.config}),
        **{f"--{name}": value for name, value in own.items() if value != usual[name] or spec.config is not None},
        "--steps": shape.steps,
        "--seeds": len(spec.seeds),
        "--data": spec.data,
        **({} if spec.text_column is None else {"--text-column": spec.text_column}),
        "--tokenizer": spec.tokenizer,
        "--tokens": shape.tokens,
        "--batch-size": shape.batch_size,
        "--learning-rate": f"{rate:g}" if float(f"{rate:g}") == rate else repr(rate),
        "--evaluations": spec.evaluations,
        "--threads": spec.threads,
        **({} if spec.device is None else {"--device": spec.device}),
        **({} if spec.dtype == "float32" else {"--dtype": spec.dtype}),
        **({} if track is None else {"--track": track}),
    }
    words = [word for name, value in arguments.items() for word in (name, str(value))]
    return shlex.join(["headloom", "compare", *words, *(["--compile"] if spec.compile else [])])


def _notes(plan: Plan) -> list[str]:
    spec, costs = plan.spec, plan.costs()
    variants = (Variant(v.mechanism, v.options, v.label, v.defaulted) for v in spec.variants)
    notes = [*plan.data.notes, *(note for variant in variants for note in variant.notes)]
    notes += [
        f"{label} remembers {cost['cache_constant_bytes']:,} bytes a sequence, however long, besides what its tokens "
        "leave in the cache."
        for label, cost in costs.items()
        if cost["cache_constant_bytes"]
    ]
    budget = spec.budget("parameters")
    if budget is not None and budget.knobs == ("F",):
        widths = ", ".join(f"{label} {cost['intermediate_size']}" for label, cost in costs.items())
        notes.append(f"Parameters are made equal by the feed-forward width: {widths}.")
    contexts = {variant.shape.tokens for variant in spec.variants}
    layers = {variant.shape.num_layers for variant in spec.variants}
    depth = f"all {layers.pop()} layers" if len(layers) == 1 else "all layers"
    context = f"a context of {contexts.pop()}" if len(contexts) == 1 else "the context"
    return [
        *notes,
        f"Attention FLOPs: forward, {depth}, projections included, 2 per multiply-add, visible pairs only, averaged "
        f"over {context}. Cache: all layers, float32.",
        "± in bits per byte is the standard deviation over seeds; ± in the difference is half its 95 % t interval, "
        "paired by seed; better and worse are said where Holm's corrected p-value is below 0.05.",
    ]


def _data_name(data: str | Path) -> str:
    text = str(data)
    if not text.strip():
        raise HeadloomError("data is empty: give 'stdlib', a file, a folder, or a Hugging Face data set 'owner/name'")
    return text
