"""`hl.compare`: train every variant with every seed at equal parameters, and say what differs by more than noise.

It is a study with defaults: `headloom.lab.spec.study` is about studies, `headloom.lab.run.runner` about their folder.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.lab.results.comparison import Comparison
from headloom.lab.run.folder import refuse_other
from headloom.lab.run.progress import Progress, told
from headloom.lab.spec.resolve import resolve_study, shape_of
from headloom.lab.spec.resolved import StudySpec
from headloom.lab.spec.sizes import get_size
from headloom.lab.spec.study import Budget, EngineOptions, WrittenStudy, usual_engine
from headloom.lab.spec.variants import Given, check_variants, split_settings
from headloom.lab.study import carry_out, check_places
from headloom.train.config import EVALUATIONS

EQUAL_PARAMETERS = Budget(match="parameters", knob=("F",))


def compare(
    variants: str | Sequence[Given] | None = None,
    *,
    settings: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    size: str = "tiny",
    layers: int | None = None,
    width: int | None = None,
    heads: int | None = None,
    config: str | Path | None = None,
    steps: int | None = None,
    seeds: int = 3,
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
    engine: str | None = None,
) -> Comparison:
    """Compare attention mechanisms on one text at equal parameters and equal steps.

    Args:
        variants: "mha,iha:pseudo_heads=2", or a list of such texts and of pairs ("iha", {"pseudo_heads": 2}); None: the
            four of defaults.toml.
        settings: ["iha.pseudo_heads=4"], or {"iha": {"pseudo_heads": 4}}: options for every variant of that name.
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
        engine: "local" (a process for each run), or "inline" (this process: for a debugger, and for Windows, where
            it is the default).

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
        study = comparison_study(
            variants,
            size,
            settings=settings,
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
        check_places(study)
        if config is None:
            shape_of(study, get_size(size), {}, "the model")
        spec = resolve_study(study, kind="compare")  # what was wrong without torch has been said: options need it
        return carry_out(study, spec, compare_command(spec, track), out, "headloom-compare", progress, report)


def comparison_study(
    variants: str | Sequence[Given] | None,
    size: str = "tiny",
    *,
    settings: Sequence[str] | Mapping[str, Mapping[str, Any]] = (),
    seeds: int,
    data: str = "stdlib",
    tokenizer: str = "bytes",
    threads: int | None = None,
    text_column: str | None = None,
    steps: int | None = None,
    tokens: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    evaluations: int = EVALUATIONS,
    engine: str | None = None,
    track: str | None = None,
    **same: Any,
) -> WrittenStudy:
    """A comparison as a study: equal parameters by the feed-forward width, equal steps, one learning rate.

    variants, settings: as `compare` takes them. same: other keys of a study, as they are.
    """
    given = check_variants(variants, settings)
    get_size(size)
    if type(seeds) is not int or not 1 <= seeds <= 1000:
        raise HeadloomError(f"seeds must be a number of seeds from 1 to 1000, not {seeds!r}")
    try:
        place = EngineOptions(name=engine or usual_engine(), track=track)  # type: ignore[arg-type]
    except ValueError:
        raise HeadloomError(f"engine must be local or inline, not '{engine}'") from None
    written: dict[str, Any] = {
        "name": "headloom-compare",
        "variants": tuple(given),
        "options": {name: dict(pairs) for name, pairs in split_settings(settings).items()},
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
    shape, rate, size = spec.shapes[spec.variants[0].label], spec.learning_rates[0], get_size(spec.size)
    own = {"layers": shape.num_layers, "width": shape.hidden_size, "heads": shape.num_heads}
    usual = {"layers": size.num_layers, "width": size.hidden_size, "heads": size.num_heads}
    arguments = {
        "--variants": ",".join(variant.text for variant in spec.variants),
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


def _data_name(data: str | Path) -> str:
    text = str(data)
    if not text.strip():
        raise HeadloomError("data is empty: give 'stdlib', a file, a folder, or a Hugging Face data set 'owner/name'")
    return text
