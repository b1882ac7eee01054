"""A study asked for again in its own folder with other seeds, variants or learning rates: what is used again.

A run is used again if and only if its own configuration (config.json, the name aside) is the one asked for now: data,
tokens, model, training and threads. Runs that are no longer asked for stay on the disk. What was measured before the
runs stays too: a step time belongs to a variant's configuration and to the variant whose time it is to take.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headloom.core.machine import versions
from headloom.lab.plan.fairness import differences
from headloom.lab.spec.resolved import StudySpec, identity
from headloom.records.manifest import RUNS, SET_ASIDE, Manifest
from headloom.records.runs import CONFIG, FAILURE, RESULT

# what may differ between two studies that have runs in common; everything else is in every run's configuration
_FREE = {"kind", "name", "title", "question", "size", "variants", "reference", "budgets", "axes", "seeds", "grid_seeds"}
_FREE |= {"learning_rates", "extend_grid", "data", "text_column", "config", "steps"}
_OF_ONE_RUN = ("seed", "learning_rate")


def differing_specs(held: Manifest, spec: StudySpec) -> dict[str, dict[str, Any]]:
    """Why no run of a study (its manifest) can be one of `spec`: key -> {"there": value, "here": value}. Empty where
    the specifications alone do not exclude it. No data is needed."""
    there, here = held.spec, spec.model_dump(mode="json")
    fixed = [
        {key: value for key, value in spec.items() if key not in _FREE} | {"versions": packages}
        for spec, packages in ((there, held.versions), (here, versions()))
    ]
    found = _between(*fixed)
    if found:
        return found
    shapes = [[variant["shape"] for variant in spec["variants"]] for spec in (there, here)]
    if not any(shape in shapes[0] for shape in shapes[1]):
        return _between(*({"size": s["size"], **v[0]} for s, v in zip((there, here), shapes, strict=True)))
    for key in ("seeds", "learning_rates"):
        if not set(there[key]) & set(here[key]):
            return {key: {"there": there[key], "here": here[key]}}
    return {}


def differing_runs(held: Manifest, resolved: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The same of two studies with their data read (`Plan.resolved`): empty where they have runs in common."""
    mine, theirs = (
        {identity(_without_run(config)) for config in configs.values()}
        for configs in (resolved["configs"], held.resolved.configs)
    )
    if mine & theirs:
        return {}
    found = _between(held.resolved.configs, resolved["configs"])
    return {key: values for key, values in found.items() if key.partition(".")[2] not in _OF_ONE_RUN}


def _between(there: Mapping[str, Any], here: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return differences({"there": there, "here": here})


def _without_run(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _OF_ONE_RUN}


def timing_key(spec: StudySpec, configs: Mapping[str, Mapping[str, Any]], label: str) -> str:
    """What a variant's step time, and its shape at equal time, follow from: its configuration before time is matched,
    how it is matched, and the same of the variant whose time it is to take."""
    passed: list[Any] = []
    budget, following = spec.budget("time"), label
    while following not in [before for before, *_ in passed]:
        variant = spec.variant(following)
        target = None if budget is None else spec.target(budget, variant)
        knobs = None if budget is None or target is None else [*budget.knobs_of(variant), budget.tolerance]
        passed.append((following, _without_run(configs[following]), knobs))
        following = following if target is None else target
    return identity(*([config, knobs] for _, config, knobs in passed))


def arrange(folder: Path, wanted: Mapping[str, Mapping[str, Any]]) -> bool:
    """Put every run that is there already where it is looked for, and out of the way what is in its place.

    Args:
        wanted: a run's folder inside `folder` -> its configuration.

    Returns whether something was moved. A study that is stopped in between is arranged by the next one.
    """
    held = {
        config.parent: _contents(CONFIG.read(config.parent))
        for place in (RUNS, SET_ASIDE)
        for config in sorted((folder / place).glob(f"*/{CONFIG.name}"))
    }
    asked = {folder / place: config for place, config in wanted.items()}
    moved = False
    for here, config in asked.items():
        content = _contents(config)
        if held.get(here) != content:
            sources = [path for path, c in held.items() if c == content and _contents(asked.get(path)) != content]
            if here in held or (sources and here.exists()):
                held[_set_aside(folder, here, held.get(here))] = held.pop(here, None)
                moved = True
            if not sources:
                continue
            sources[0].rename(here)
            held[here] = held.pop(sources[0])
            moved = True
        _rename(here, str(config["name"]))
    return moved


def _contents(config: Mapping[str, Any] | None) -> str | None:
    """What two runs have in common if they are the same one: all of its configuration but the name."""
    return None if config is None else identity({key: value for key, value in config.items() if key != "name"})


def _set_aside(folder: Path, here: Path, contents: str | None) -> Path:
    (folder / SET_ASIDE).mkdir(exist_ok=True)
    found, number = folder / SET_ASIDE / f"{here.name}-{contents or 'unfinished'}", 1
    while found.exists():
        number += 1
        found = folder / SET_ASIDE / f"{here.name}-{contents or 'unfinished'}-{number}"
    here.rename(found)
    return found


def _rename(here: Path, name: str) -> None:
    """A run that belonged to a variant of another label gets the name it has now."""
    result, failure = RESULT.read_if_there(here), FAILURE.read_if_there(here)
    if result is not None and result.name != name:
        RESULT.write(here, result.model_copy(update={"name": name}))
    if failure is not None and failure.name != name:
        FAILURE.write(here, failure.model_copy(update={"name": name}))
    config = CONFIG.read_if_there(here)  # the last one says whether it is done
    if config is not None and config["name"] != name:
        CONFIG.write(here, {**config, "name": name})
