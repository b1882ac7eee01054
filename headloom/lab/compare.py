"""`hl.compare`: train every variant with every seed at equal parameters, and say what differs by more than noise.

    study/study.json      what was asked, on what, with the interleaved step times     results.json, results.csv
    study/runs/<variant>-seed<k>/{config.json, metrics.jsonl, result.json}             report.html, figures/

A study stopped at any moment goes on when it is asked for again: finished runs are kept, the one that was cut is made
anew from its seed, so the numbers are those of an undisturbed study.
"""

from __future__ import annotations

import datetime
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError, RunError
from headloom.lab.folder import locked, open_folder, read_json, write_json
from headloom.lab.plan import Plan, make_plan
from headloom.lab.progress import Progress
from headloom.lab.results import read_run, run_folder, summarise, write_results
from headloom.lab.sizes import get_size
from headloom.lab.spec import CompareSpec, identity, make_spec
from headloom.lab.variants import Variant, parse_variants


class Interrupted(KeyboardInterrupt):
    """Ctrl-C during a study. Its text says what was kept and how to go on."""


@dataclass(frozen=True)
class Comparison:
    """A study that has been run: `results` is the content of results.json, `report` the page (None: none was asked)."""

    folder: Path
    results: dict[str, Any]
    report: Path | None = None

    @property
    def headlines(self) -> list[str]:
        """The findings in sentences."""
        return list(self.results["headlines"])

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The runs that failed, each with its reason."""
        return [run for run in self.results["runs"] if run["status"] == "failed"]


def compare(
    variants: str | Sequence[str] | None = None,
    *,
    settings: Sequence[str] = (),
    size: str = "tiny",
    steps: int | None = None,
    seeds: int = 3,
    data: str | Path = "stdlib",
    tokenizer: str | Path = "bytes",
    tokens: int | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    threads: int | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: bool = True,
) -> Comparison:
    """Compare attention mechanisms on one text at equal parameters and equal steps.

    Args:
        variants: "mha,iha:pseudo_heads=2" or a list of such texts; None: the four of defaults.toml.
        settings: ["iha.pseudo_heads=4"]: options for every variant of that name.
        size: a name of `headloom.lab.sizes`; the reference keeps its feed-forward width, the others' is turned.
        steps, tokens, batch_size, learning_rate: steps, context, sequences a step, peak rate; None: the size's.
        seeds: how many seeds; from two on there are intervals.
        data, tokenizer: as `headloom.data.load_corpus` and `make_tokenizer` take them.
        threads: processor threads; None: all this process may use.
        out: the study's folder; None: headloom-compare here, or the first free number after it.
        progress: is told what happens. report: also write report.html and figures/.

    Raises:
        HeadloomError: the call is wrong; nothing was trained.
        Interrupted: Ctrl-C; what was finished is kept.

    A run that fails is recorded with its reason and the others go on: see `Comparison.failed`.
    """
    progress = progress or Progress()
    with progress:
        progress.stage("reading the call")
        parsed = parse_variants(variants, settings)
        spec = make_spec(
            parsed,
            get_size(size),
            seeds=seeds,
            data=_data_name(data),
            tokenizer=str(tokenizer),
            threads=_cores() if threads is None else threads,
            steps=steps,
            tokens=tokens,
            batch_size=batch_size,
            learning_rate=learning_rate,
        )
        progress.stage("reading the text and matching parameters")
        plan = make_plan(spec)
        resolved = plan.resolved
        study_hash = identity(resolved)
        folder = open_folder(out, study_hash, resolved)
        with locked(folder):
            return _Study(plan, folder, study_hash, _notes(parsed, plan), progress, report).run(resolved)


class _Study:
    """A plan being carried out in a folder."""

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        study_hash: str,
        notes: Sequence[str],
        progress: Progress,
        report: bool,
    ) -> None:
        self.plan, self.folder, self.hash = plan, folder, study_hash
        self.notes, self.progress, self.report = notes, progress, report
        self.timing: dict[str, dict[str, Any]] = {}

    @property
    def spec(self) -> CompareSpec:
        return self.plan.spec

    def run(self, resolved: dict[str, Any]) -> Comparison:
        """Measure the steps, make the runs that are missing, write the result."""
        before = read_json(self.folder / "study.json") or {}
        self.timing = before.get("timing") or {}
        record = self._record(resolved, before.get("started"))
        write_json(self.folder / "study.json", record)
        try:
            if not self.timing:
                from headloom.lab.timing import step_times

                self.progress.stage("measuring step times")
                self.timing = step_times(self.plan)
                write_json(self.folder / "study.json", {**record, "timing": self.timing})
            self._runs()
        except KeyboardInterrupt:
            self._finish()
            raise Interrupted(self._how_to_go_on()) from None
        return self._finish()

    def _runs(self) -> None:
        order = [(variant.label, seed) for seed in self.spec.seeds for variant in self.spec.variants]
        kept = [key for key in order if self._is_finished(*key)]
        self.progress.start(len(order), self.spec.steps, len(kept))
        if kept:
            self.progress.note(f"{len(kept)} of {len(order)} runs are finished already and kept in '{self.folder}'")
        for number, key in enumerate(order, start=1):
            if key not in kept:
                self.progress.run(*key, number)
                self.progress.ran(self._one(*key))
                write_results(self.folder, self._results())

    def _one(self, label: str, seed: int) -> str:
        """Make one run; returns what came of it in a few words."""
        from headloom.train import train

        place = self.folder / run_folder(label, seed)
        try:
            result = train(
                self.plan.runs[label, seed],
                self.plan.data,
                self.plan.tokenizer,
                place,
                lambda step, steps, loss: self.progress.step(step, loss),
            )
        except RunError as error:
            self._record_failure(place, label, seed, str(error))
            return f"failed: {error}"
        except HeadloomError:
            raise
        except (RuntimeError, MemoryError, ArithmeticError) as error:  # out of memory, say: the others may still fit
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._record_failure(place, label, seed, reason)
            return f"failed: {reason}"
        return f"{result.bits_per_byte:.4f} bits per byte after {result.train_seconds:.1f} s"

    def _record_failure(self, place: Path, label: str, seed: int, reason: str) -> None:
        if read_json(place / "failure.json") is None:
            place.mkdir(parents=True, exist_ok=True)
            write_json(place / "config.json", self.plan.runs[label, seed].to_dict())
            write_json(place / "failure.json", {"name": f"{label}-seed{seed}", "seed": seed, "reason": reason})

    def _is_finished(self, label: str, seed: int) -> bool:
        """Whether a run's result is there and belongs to this very configuration."""
        if read_run(self.folder, label, seed)["status"] != "finished":
            return False
        held = read_json(self.folder / run_folder(label, seed) / "config.json")
        return held == self.plan.runs[label, seed].to_dict()

    def _results(self) -> dict[str, Any]:
        return summarise(
            self.spec,
            self.folder,
            study_hash=self.hash,
            planned=self.plan.budgets,
            configs=self.plan.configs,
            timing=self.timing,
            notes=self.notes,
        )

    def _finish(self) -> Comparison:
        results = self._results()
        write_results(self.folder, results)
        if not self.report:
            return Comparison(self.folder, results)
        from headloom.report.page import write_report

        self.progress.stage("drawing the page")
        return Comparison(self.folder, results, write_report(self.folder))

    def _how_to_go_on(self) -> str:
        runs = self._results()["runs"]
        done = sum(run["status"] == "finished" for run in runs)
        command = f"{self.spec.command} --out {shlex.quote(str(self.folder))}"
        return f"stopped: {done} of {len(runs)} runs are finished and kept; to go on: {command}"

    def _record(self, resolved: dict[str, Any], started: str | None) -> dict[str, Any]:
        """The content of study.json."""
        from headloom.train.records import machine

        spec, data = self.spec, self.plan.data
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        return {
            "format": 1,
            "kind": "compare",
            "hash": self.hash,
            "spec": spec.model_dump(mode="json"),
            "resolved": resolved,
            "data": {
                "title": self.plan.corpus.title,
                "fingerprint": self.plan.corpus.fingerprint,
                "tokens_fingerprint": data.fingerprint,
                "train_documents": data.train.documents,
                "validation_documents": data.validation.documents,
                "train_tokens": len(data.train.ids),
                "validation_tokens": len(data.validation.ids),
            },
            "versions": resolved["versions"],
            "machine": {**machine(), "threads": spec.threads},
            "command": spec.command,
            "training_text": _training_text(self.plan),
            "timing_text": (
                "the median of interleaved repetitions of every variant's whole training step (forward, backward, "
                "clipping, AdamW), measured before the runs"
            ),
            "timing": self.timing,
            "started": started or now,
        }


def _training_text(plan: Plan) -> str:
    spec = plan.spec
    run = next(iter(plan.runs.values()))
    seen = spec.steps * spec.batch_size * (spec.tokens - 1)
    return (
        f"{spec.steps} steps of {spec.batch_size} sequences of {spec.tokens} tokens ({seen:,} predicted tokens, "
        f"{seen / max(1, plan.data.train.predictions):.2f} of the training text); AdamW, peak learning rate "
        f"{spec.learning_rate:g} for every variant (not tuned), {spec.warmup_steps} warm-up steps, then a cosine to "
        f"{run.final_learning_rate:g} of it; weight decay {run.weight_decay:g}, clipping at {run.clip:g}; "
        f"{len(spec.seeds)} seeds; every seed gives all variants the same data order, and the same initial value to "
        "every tensor of equal name and shape"
    )


def _notes(variants: Sequence[Variant], plan: Plan) -> list[str]:
    spec = plan.spec
    notes = [
        f"{variant.label} runs with {name}={variant.options[name]}: the comparison's default, used where none is given."
        for variant in variants
        for name in variant.defaulted
    ]
    notes += [
        f"{label} remembers {budget['cache_constant_bytes']:,} bytes a sequence, however long, besides what its tokens "
        "leave in the cache."
        for label, budget in plan.budgets.items()
        if budget["cache_constant_bytes"]
    ]
    widths = ", ".join(f"{label} {budget['intermediate_size']}" for label, budget in plan.budgets.items())
    return [
        *notes,
        f"Parameters are made equal by the feed-forward width: {widths}.",
        f"Attention FLOPs: forward, all {spec.num_layers} layers, projections included, 2 per multiply-add, visible "
        f"pairs only, averaged over a context of {spec.tokens}. Cache: all layers, float32.",
        "± in bits per byte is the standard deviation over seeds; ± in the difference is half its 95 % t interval, "
        "paired by seed; better and worse are said where Holm's corrected p-value is below 0.05.",
    ]


def _data_name(data: str | Path) -> str:
    text = str(data)
    if not text.strip():
        raise HeadloomError("data is empty: give 'stdlib', a file, a folder, or a Hugging Face data set 'owner/name'")
    return text


def _cores() -> int:
    from headloom.train.records import machine

    return int(machine()["cores"])
