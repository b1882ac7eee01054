"""Looking at studies without running them: how far one is, and what two differ in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError, near
from headloom.core.locks import is_locked
from headloom.lab.plan.fairness import differences
from headloom.lab.results.runs import RunReader, is_beyond
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.resolved import StudySpec
from headloom.lab.spec.study import WrittenStudy
from headloom.records.files import checked
from headloom.records.manifest import STUDY, Manifest


def study_status(folder: Path) -> dict[str, Any]:
    """Counts of runs by state, the failures, whether a process is at it, and the command that goes on with it."""
    study = STUDY.read(folder)
    spec = _spec(study, folder)
    runs = [run for run, _ in RunReader(spec, folder).all()]
    total = len(spec.variants) * (len(spec.learning_rates) * spec.grid_seeds + len(spec.seeds) - spec.grid_seeds)
    total += sum(is_beyond(spec, run.seed, run.learning_rate) for run in runs)  # as far as they are decided on
    counts = Counter(run.status for run in runs)
    counts["waiting"] = total - counts["finished"] - counts["failed"]  # those at rates not chosen yet too
    return {
        "name": study.name,
        "hash": study.hash,
        "command": study.command,
        "running": is_locked(folder),
        "runs": {name: counts[name] for name in ("finished", "failed", "waiting")},
        "failures": [
            {
                "variant": run.variant,
                "seed": run.seed,
                "learning_rate": run.learning_rate,
                "reason": run.failure.reason,
            }
            for run in runs
            if run.failure
        ],
    }


def study_differences(first: str, second: str, *, size: str | None = None) -> dict[str, dict[str, Any]]:
    """Key -> {first: value, second: value} of two studies (folders, files, ready names) or of FOLDER@VARIANT."""
    names = [first, second if second != first else f"{second} (again)"]
    return differences({name: _settings(what, size) for name, what in zip(names, (first, second), strict=True)})


def _settings(what: str, size: str | None) -> dict[str, Any]:
    place, at, label = what.partition("@")
    if Path(place).is_dir():
        study = STUDY.read(Path(place))
        if at:
            return _config(study, label)
        frozen = {label: shape.to_dict() for label, shape in study.frozen.items()}
        data = {"fingerprint": study.data.fingerprint}
        return {**_keyed(study.spec), "data_read": data, "versions": study.versions, "frozen": frozen}
    if at:
        raise HeadloomError(f"'{place}' is no study's folder, so it has no variants that were resolved: give a folder")
    return _keyed(resolve_study(WrittenStudy.from_yaml(place, size=size)).model_dump(mode="json"))


def _config(study: Manifest, label: str) -> dict[str, Any]:
    configs = study.resolved.configs
    if label not in configs:
        raise HeadloomError(f"'{label}' is no variant.{near(label, configs)} They are: {', '.join(configs)}")
    frozen = study.frozen.get(label)
    return {**configs[label], **(frozen.to_dict() if frozen else {})}


def _keyed(spec: dict[str, Any]) -> dict[str, Any]:
    """With variants and budgets by name, so that they are compared one by one."""
    variants = {v["label"]: {key: value for key, value in v.items() if key != "label"} for v in spec["variants"]}
    budgets = {b["match"]: b for b in spec["budgets"]}
    return {**spec, "variants": variants, "budgets": budgets}


def _spec(study: Manifest, folder: Path) -> StudySpec:
    values = {key: value for key, value in study.spec.items() if key != "steps"}  # that of the reference, for readers
    return checked(StudySpec, values, folder / STUDY.name)
