"""What a study folder holds, read back: study.json, results.json, and each run's metrics.jsonl.

study.json    spec, data, machine, versions, command, timing       written before the first run
results.json  variants, runs, headlines, notes, config differences  rewritten after each run
<a run's folder>/metrics.jsonl   one JSON object a line: step, tokens, seconds, loss, ...
<a run's folder>/mixes.npz       its learned mixes after training, where it has some

What a record may lack (a study written by an earlier version, a comparison without a grid) is read with `.get`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError


@dataclass(frozen=True)
class Study:
    """A study folder's records as plain dicts."""

    folder: Path
    study: dict[str, Any]
    results: dict[str, Any]

    @property
    def labels(self) -> list[str]:
        return [variant["label"] for variant in self.results["variants"]]

    @property
    def chosen(self) -> list[dict[str, Any]]:
        """The runs with the learning rate that is reported: all of them where no grid was asked for."""
        return [run for run in self.results["runs"] if run.get("chosen", True)]

    @property
    def finished(self) -> list[dict[str, Any]]:
        """Of the chosen runs, those with a result."""
        return [run for run in self.chosen if run["status"] == "finished"]

    def against(self, variant: dict[str, Any]) -> str | None:
        """The label a variant is compared with; None for a reference."""
        reference: str = self.results["reference"]
        default = None if variant["label"] == reference else reference
        found: str | None = variant.get("against", default)
        return found

    def group(self, variant: dict[str, Any]) -> str:
        """The reference at the end of the variant's comparisons: variants that share it are compared together."""
        by_label = {known["label"]: known for known in self.results["variants"]}
        passed: list[str] = []
        while (against := self.against(variant)) in by_label and variant["label"] not in passed:
            passed.append(variant["label"])
            variant = by_label[against]
        label: str = variant["label"]
        return label


def read_study(folder: Path | str) -> Study:
    """The records of a study folder; HeadloomError if it is not one."""
    folder = Path(folder)
    return Study(folder, _read(folder / "study.json"), _read(folder / "results.json"))


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise HeadloomError(
            f"'{path.parent}' holds no {path.name}: give the folder that headloom compare wrote"
        ) from None
    except (ValueError, OSError) as error:
        raise HeadloomError(f"'{path}' cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise HeadloomError(f"'{path}' holds {type(found).__name__}, not a study's records")
    return found
