"""A whole study's folder, read back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from headloom.records.files import checked
from headloom.records.manifest import STUDY, Manifest, StudyAsked
from headloom.records.results import RESULTS, FinishedRun, Results, StudyRun, VariantResult


@dataclass(frozen=True)
class StudyRecords:
    """The records of a study: its manifest, what was found, and what of the specification a report shows."""

    folder: Path
    manifest: Manifest
    results: Results
    asked: StudyAsked

    @property
    def variants(self) -> tuple[VariantResult, ...]:
        """In the study's order."""
        return self.results.variants

    @property
    def labels(self) -> list[str]:
        """Of the variants."""
        return [variant.label for variant in self.variants]

    @property
    def chosen(self) -> list[StudyRun]:
        """The runs with the learning rate that is reported: all of them where no grid was asked for."""
        return [run for run in self.results.runs if run.chosen]

    @property
    def finished(self) -> list[FinishedRun]:
        """Of the chosen runs, those with a result."""
        return [run for run in self.chosen if isinstance(run, FinishedRun)]

    @cached_property
    def groups(self) -> dict[str, str]:
        """Label -> the reference at the end of its comparisons: variants that share it are compared together."""
        against = {variant.label: variant.against for variant in self.variants}
        found = {}
        for label in against:
            end, passed = label, [label]
            while (other := against[end]) in against and other not in passed:
                end = str(other)
                passed.append(end)
            found[label] = end
        return found

    def place(self, run: StudyRun) -> Path:
        """The folder of a run."""
        return self.folder / run.folder


def read_study(folder: Path | str) -> StudyRecords:
    """The records of a study's folder.

    Raises HeadloomError, one sentence, for a folder that holds no study, and for files that are damaged or of a format
    that this version does not read.
    """
    folder = Path(folder)
    manifest, results = STUDY.read(folder), RESULTS.read(folder)
    return StudyRecords(folder, manifest, results, checked(StudyAsked, manifest.spec, folder / STUDY.name))
