"""A study being carried out in a folder.

    study/study.yaml     the study as it was asked for: `headloom study run` makes it again from this file
    study/study.json     the manifest: what was asked, resolved, its hash, data fingerprints, versions, machine,
                         command; step times, and the shapes after matching (`timing`, `frozen`): measured once
    study/results.json, results.csv   what was found (headloom.lab.results.summary)     report.html, figures/   the page
    study/runs/<variant>[-lr<rate>]-seed<k>/   one run (headloom.records.runs), and log.txt, what its process said

Every file is written whole or not at all. A study stopped at any moment, by SIGKILL too, goes on when it is asked for
again: finished runs are kept, one that was cut goes on from its last checkpoint, and on a CPU the numbers are those
of an undisturbed study to the last bit. A failed run keeps its reason and the others go on; asked for again it is tried
again.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headloom.core.files import saying_when_full, write_text
from headloom.core.locks import locked
from headloom.core.machine import machine
from headloom.lab.plan.budget import Match
from headloom.lab.plan.places import folder_of
from headloom.lab.plan.plan import Plan
from headloom.lab.plan.timing import Measured, match_time
from headloom.lab.results.comparison import Comparison
from headloom.lab.results.runs import RunReader, is_beyond
from headloom.lab.results.summary import summarise
from headloom.lab.run.engines import Engine, Listener, open_engine
from headloom.lab.run.growth import arrange, timing_key
from headloom.lab.run.progress import Progress
from headloom.lab.run.work import Bundle, Job, foreign
from headloom.lab.spec.resolved import Shape, StudySpec
from headloom.lab.spec.study import WrittenStudy
from headloom.records.manifest import STUDY, STUDY_YAML, Manifest, MeasuredVariant, ResolvedStudy, StudyData
from headloom.records.results import BudgetMet, ModelShape, Results, StepTime, write_results
from headloom.records.runs import CONFIG, FAILURE, RunFailure
from headloom.records.surroundings import Machine

TIMING_TEXT = (
    "the median of interleaved repetitions of every variant's whole training step (forward, backward, clipping, "
    "AdamW), measured once, before the runs"
)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a study. Its text says what was kept and how to go on."""


class Runner(Listener):
    """A plan, its folder, and what is done with it."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        study_hash: str,
        resolved: dict[str, Any],
        study: WrittenStudy,
        command: str,
        notes: Sequence[str],
        progress: Progress,
        report: bool,
    ) -> None:
        self.plan, self.folder, self.hash, self.resolved = plan, folder, study_hash, resolved
        self.study, self.command, self.notes = study, command, notes
        self.progress, self.report = progress, report
        self.timing: dict[str, StepTime] = {}
        self._reader = RunReader(plan.spec, folder)
        self._numbers: dict[str, int] = {}

    @property
    def spec(self) -> StudySpec:
        """The study, resolved."""
        return self.plan.spec

    def run(self) -> Comparison:
        """Measure the steps, make the runs that are missing, write the result."""
        names = [
            layer.mechanism for v in self.spec.variants for layer in self.plan.run(v.label, self.spec.seeds[0]).specs
        ]
        away = foreign(names, same_process=self.study.engine.name == "inline")
        bundle = Bundle(self.plan.data, self.plan.selection, self.plan.tokenizer, away)
        with (
            locked(self.folder),
            saying_when_full(self.folder),
            open_engine(self.study.engine, bundle, threads=self.spec.threads) as engine,
        ):
            return self._run(engine)

    def _run(self, engine: Engine) -> Comparison:
        before = STUDY.read_if_there(self.folder)
        self._held = before and before.hash
        self._started = before.started if before else _now()
        try:
            self._match_time(engine, before)
            self._runs(engine)
        except KeyboardInterrupt:
            if self._held not in (None, self.hash):
                raise Interrupted(f"stopped: '{self.folder}' is as it was; to go on: {self._again()}") from None
            self._finish()
            raise Interrupted(self._how_to_go_on()) from None
        return self._finish()

    def _match_time(self, engine: Engine, before: Manifest | None) -> None:
        """Take step times and shapes from the manifest as far as they are there, measure the rest, and write it all."""
        spec, kept = self.spec, dict(before.measured) if before else {}
        keys = {v.label: timing_key(spec, self.resolved["configs"], v.label) for v in spec.variants}
        known = Measured(
            {label: kept[key].timing.to_dict() for label, key in keys.items() if key in kept},
            {label: Shape(**kept[key].shape.to_dict()) for label, key in keys.items() if key in kept},
            {
                label: Match(met.match, met.knobs, met.target, met.count)
                for label, key in keys.items()
                if key in kept and (met := kept[key].match) is not None
            },
        )
        if before is None:
            self._write_manifest(Measured(), {})
        if len(known.timing) < len(keys):
            self.progress.stage("measuring step times")
        found = match_time(spec, self.plan.shapes, lambda shapes: self._measure(engine, shapes), known)
        self._time_matched(found)
        if self._held != self.hash or len(known.timing) < len(keys):
            for label, key in keys.items():
                match = found.matches.get(label)
                kept[key] = MeasuredVariant(
                    timing=self.timing[label],
                    shape=_shape(found.shapes[label]),
                    match=_met(match) if match else None,
                )
            self._write_manifest(found, kept)

    def _time_matched(self, found: Measured) -> None:
        matches = dict(self.plan.matches)
        for label, match in found.matches.items():
            matches[label] = (*matches[label], match)
        self.timing = {label: StepTime.model_validate(times) for label, times in found.timing.items()}
        self.plan = self.plan.with_shapes(found.shapes, matches)
        self._costs, self._configs = self.plan.costs(), self.plan.configs

    def _measure(self, engine: Engine, shapes: Mapping[str, Shape]) -> dict[str, dict[str, Any]]:
        plan = self.plan.with_shapes({**self.plan.shapes, **shapes}, self.plan.matches)
        runs = {label: plan.run(label, self.spec.seeds[0]).to_dict() for label in shapes}
        return engine.one(Job("step times", "time", None, {"runs": runs}))

    def _runs(self, engine: Engine) -> None:
        """The runs that are missing; where there is a grid, those beyond its edges and at the chosen rates as soon as
        what they follow from is complete."""
        from headloom.train.checkpoints import remove_all

        spec, again = self.spec, True
        while again:
            keys = self._keys()
            first = not self._numbers
            jobs = {key: self._job(*key) for key in keys}
            for job in jobs.values():
                self._numbers.setdefault(job.name, len(self._numbers) + 1)
            finished = {key for key in keys if self._is_finished(*key)}
            waiting = [job for key, job in jobs.items() if key not in finished]
            waiting = [job for job in waiting if first or job.name not in self._tried]
            if first:
                self._tried: set[str] = set()
                for key in finished:  # a kill between a result and this would have left them
                    remove_all(self.folder / folder_of(spec, *key))
                self._announce(keys, waiting)
            else:
                added = [job for (_, seed, rate), job in jobs.items() if job in waiting and is_beyond(spec, seed, rate)]
                self.progress.more(len(added), sum(job.settings["run"]["steps"] for job in added))
            self._tried |= {job.name for job in waiting}
            for job in waiting:
                self._forget_failure(job)
            engine.run(waiting, self)
            again = bool(waiting) and spec.has_grid and (spec.grid_seeds < len(spec.seeds) or spec.extend_grid > 0)

    def _keys(self) -> list[tuple[str, int, float]]:
        """The runs as far as they are decided on, those that are there each in its place."""
        while True:
            keys = [(run.variant, run.seed, run.learning_rate) for run, _ in self._reader.all()]
            wanted = {folder_of(self.spec, *key): self.plan.run(*key).to_dict() for key in keys}
            if not arrange(self.folder, wanted):
                return keys
            self._reader.forget()  # what is in its place now may decide on others

    def _announce(self, keys: Sequence[tuple[str, int, float]], waiting: Sequence[Job]) -> None:
        spec, known = self.spec, {(label, seed) for label, seed, _ in keys}
        # those whose learning rate is not chosen yet
        later = [v.label for v in spec.variants for seed in spec.seeds if (v.label, seed) not in known]
        total, kept = len(keys) + len(later), len(keys) - len(waiting)
        steps = sum(job.settings["run"]["steps"] for job in waiting)
        steps += sum(self.plan.shapes[label].steps for label in later)
        self.progress.start(total, steps, kept)
        if kept:
            self.progress.note(f"{kept} of {total} runs are finished already and kept in '{self.folder}'")

    def _job(self, label: str, seed: int, rate: float) -> Job:
        run = self.plan.run(label, seed, rate)
        at = f" at {rate:g}" if self.spec.has_grid else ""
        options = self.study.engine
        return Job(
            f"{label} seed {seed}{at}",
            "train",
            str(self.folder / folder_of(self.spec, label, seed, rate)),
            {
                "run": run.to_dict(),
                "flops_per_token": self._costs[label]["training_flops_per_token_exact"],
                "checkpoint_seconds": options.checkpoint_seconds,
                "track": options.track,
            },
        )

    def _is_finished(self, label: str, seed: int, rate: float) -> bool:
        """Whether a run's result is there and belongs to this very configuration."""
        if self._reader.read(label, seed, rate).status != "finished":
            return False
        place = self.folder / folder_of(self.spec, label, seed, rate)
        return CONFIG.read_if_there(place) == self.plan.run(label, seed, rate).to_dict()

    # what the engine says

    def started(self, job: Job) -> None:
        """Pass on that a run begins."""
        self.progress.run(job.name, self._numbers[job.name])

    def step(self, job: Job, step: int, loss: float) -> None:
        """Pass on how far a run is."""
        self.progress.step(self._numbers[job.name], step, loss)

    def done(self, job: Job, result: dict[str, Any]) -> None:
        """Write the results again, now with this run."""
        text = f"{result['bits_per_byte']:.4f} bits per byte after {result['train_seconds']:.1f} s"
        self._ran(job, text)

    def failed(self, job: Job, reason: str) -> None:
        """Record why a run failed, and write the results again."""
        assert job.folder is not None
        place = Path(job.folder)
        if not FAILURE.is_in(place):
            place.mkdir(parents=True, exist_ok=True)
            run = job.settings["run"]
            CONFIG.write(place, run)
            FAILURE.write(place, RunFailure(name=run["name"], seed=run["seed"], reason=reason))
        self._ran(job, f"failed: {reason}")

    def _ran(self, job: Job, text: str) -> None:
        self.progress.ran(self._numbers[job.name], text)
        write_results(self.folder, self._results())

    def _forget_failure(self, job: Job) -> None:
        assert job.folder is not None
        (Path(job.folder) / FAILURE.name).unlink(missing_ok=True)

    # what is written

    def _results(self) -> Results:
        return summarise(
            self.spec,
            self.folder,
            self._reader,
            study_hash=self.hash,
            planned=self._costs,
            configs=self._configs,
            timing=self.timing,
            notes=self.notes,
        )

    def _finish(self) -> Comparison:
        if not self.timing:  # stopped before anything could be said
            self._time_matched(Measured({}, self.plan.shapes))
        results = self._results()
        write_results(self.folder, results)
        if not self.report:
            return Comparison(self.folder, results)
        from headloom.report.page import write_report

        self.progress.stage("drawing the page")
        return Comparison(self.folder, results, write_report(self.folder))

    def _how_to_go_on(self) -> str:
        runs = self._results().runs
        done = sum(run.status == "finished" for run in runs)
        return f"stopped: {done} of {len(runs)} runs are finished and kept; to go on: {self._again()}"

    def _again(self) -> str:
        return f"{self.command} --out {shlex.quote(str(self.folder))}"

    def _write_manifest(self, found: Measured, kept: Mapping[str, MeasuredVariant]) -> None:
        """study.yaml and study.json: what was asked for last. `kept`: all that was ever measured in this folder, for a
        variant that comes back."""
        spec, plan = self.spec, self.plan
        data = plan.data
        record = Manifest(
            kind=spec.kind,
            name=spec.name,
            title=spec.title,
            question=spec.question,
            hash=self.hash,
            spec={**spec.model_dump(mode="json"), "steps": spec.steps},
            resolved=ResolvedStudy.model_validate(self.resolved),
            data=StudyData(
                title=plan.corpus.title,
                fingerprint=plan.corpus.fingerprint,
                tokens_fingerprint=data.fingerprint,
                train_documents=data.train.documents,
                validation_documents=data.validation.documents,
                train_tokens=len(data.train.ids),
                validation_tokens=len(data.validation.ids),
                selection_tokens=None if plan.selection is None else len(plan.selection.ids),
            ),
            versions=self.resolved["versions"],
            machine=Machine.model_validate({**machine(), "threads": spec.threads}),
            engine=self.study.engine.name,
            command=self.command,
            training_text=training_text(plan),
            timing_text=TIMING_TEXT,
            timing=self.timing,
            frozen={label: _shape(shape) for label, shape in found.shapes.items()},
            time_matches={label: _met(match) for label, match in found.matches.items()},
            measured=dict(kept),
            started=self._started,
        )
        if self._held != self.hash:
            write_text(self.folder / STUDY_YAML, self.study.to_yaml())
        STUDY.write(self.folder, record)
        self._held = self.hash


def _shape(shape: Shape) -> ModelShape:
    return ModelShape(**shape.model_dump())


def _met(match: Match) -> BudgetMet:
    return BudgetMet(
        match=match.match, knobs=match.knobs, target=match.target, count=match.count, relative=match.relative
    )


def training_text(plan: Plan) -> str:
    """How every variant is trained, in one sentence."""
    spec = plan.spec
    shape = plan.shapes[spec.reference]
    run = plan.run(spec.reference, spec.seeds[0])
    rates = ", ".join(f"{rate:g}" for rate in spec.learning_rates)
    beyond = f" (and at most {spec.extend_grid} beyond, where the best lies at an edge)" if spec.extend_grid else ""
    tuned = (
        f"the best of the peak learning rates {rates}{beyond} for each variant, chosen over {spec.grid_seeds} seeds on "
        "a text that is not reported"
        if spec.has_grid
        else f"peak learning rate {rates} for every variant (not tuned)"
    )
    alike = len({(s.steps, s.tokens, s.batch_size) for s in plan.shapes.values()}) == 1
    whose = "" if alike else f"{spec.reference}: "
    return (
        f"{whose}{shape.steps} steps of {shape.batch_size} sequences of {shape.tokens} tokens "
        f"({shape.tokens_trained:,} predicted tokens, "
        f"{shape.tokens_trained / max(1, plan.data.train.predictions):.2f} of the training text); AdamW, {tuned}, "
        f"{shape.warmup_steps} warm-up steps, then a cosine to "
        f"{run.final_learning_rate:g} of it; weight decay {run.weight_decay:g}, clipping at {run.clip:g}; "
        f"{len(spec.seeds)} seeds; every seed gives all variants the same data order, and the same initial value to "
        "every tensor of equal name and shape"
    )


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
