"""`hl.Study`: a study that can be run. What can be written in one stands in headloom.lab.spec.study."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headloom.core.errors import HeadloomError
from headloom.lab.plan.plan import Plan, make_plan
from headloom.lab.results.comparison import Comparison
from headloom.lab.run.folder import open_study_folder, refuse_other
from headloom.lab.run.growth import differing_specs
from headloom.lab.run.progress import Progress, told
from headloom.lab.run.runner import Runner
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.resolved import StudySpec, identity
from headloom.lab.spec.sizes import get_size
from headloom.lab.spec.study import WrittenStudy
from headloom.records.manifest import STUDY_YAML, Manifest
from headloom.train.config import check_device
from headloom.train.tracking import check_tracker

if TYPE_CHECKING:
    from headloom.data.corpus import Corpus


class Study(WrittenStudy):
    """A study: `Study.from_yaml(path).run()`, or of Python values, `Study(variants=["mha", "iha"]).run()`.

    Its keys are those of `headloom.lab.spec.study.WrittenStudy`.
    """

    def run(
        self, out: str | Path | None = None, *, progress: Progress | bool | None = None, report: bool = True
    ) -> Comparison:
        """Run it, or what is left of it, in the folder `out` (None: the study's name here, or the next free number).

        Args:
            progress: None shows it on stderr, False does not; or one of your own, which is told what happens.
            report: also write report.html and figures/.

        Raises:
            HeadloomError: the study is wrong; nothing was trained.
            headloom.lab.run.runner.Interrupted: Ctrl-C; what was finished is kept.
        """
        return run_study(self, out=out, progress=progress, report=report)


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
        return carry_out(study, resolve_study(study), command, out, study.name, progress, report)


def check_places(study: WrittenStudy) -> None:
    """Refuse what can be known to be wrong from names, paths and this machine, before anything is read or built."""
    from headloom.data.corpus import check_corpus
    from headloom.data.tokenizer import check_tokenizer

    get_size(study.size)
    check_tracker(study.engine.track)
    if study.config is not None and not Path(study.config).expanduser().exists():
        raise HeadloomError(
            f"'{study.config}' holds no Hugging Face config: it does not exist. Give a folder with a config.json, or "
            "such a JSON file"
        )
    check_corpus(study.data, text_column=study.text_column)
    check_tokenizer(study.tokenizer)
    check_device(None if study.device == "auto" else study.device)


def carry_out(
    study: WrittenStudy,
    spec: StudySpec,
    command: str | None,
    out: str | Path | None,
    default: str,
    progress: Progress,
    report: bool,
) -> Comparison:
    """Plan a resolved study, open its folder, and run what is missing there.

    Args:
        command: the command line that makes it; None: `headloom study run` with its own study.yaml.
        out: the folder; None: `default` here, or the first free number after it.

    Raises HeadloomError before anything is trained where the folder holds another study or the data cannot be used.
    """
    progress.stage("reading the text and matching budgets")
    if out is not None:
        refuse_other(Path(out), lambda held: differing_specs(held, spec))
    plan = make_plan(spec, lambda corpus: _same_text(out, corpus))
    for note in plan.data.notes:
        progress.note(note)
    resolved = plan.resolved
    study_hash = identity(resolved)
    folder = open_study_folder(out, study_hash, resolved, default=default)
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


def _notes(plan: Plan) -> list[str]:
    spec, costs = plan.spec, plan.costs()
    notes = [*plan.data.notes, *(note for variant in spec.variants for note in variant.notes)]
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
    contexts = {shape.tokens for shape in spec.shapes.values()}
    layers = {shape.num_layers for shape in spec.shapes.values()}
    depth = f"all {layers.pop()} layers" if len(layers) == 1 else "all layers"
    context = f"a context of {contexts.pop()}" if len(contexts) == 1 else "the context"
    return [
        *notes,
        f"Attention FLOPs: forward, {depth}, projections included, 2 per multiply-add, visible pairs only, averaged "
        f"over {context}. Cache: all layers, float32.",
        "± in bits per byte is the standard deviation over seeds; ± in the difference is half its 95 % t interval, "
        "paired by seed; better and worse are said where Holm's corrected p-value is below 0.05.",
    ]
