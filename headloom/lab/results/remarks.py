"""What a reader of a study's results has to know beside its table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from headloom.lab.spec.resolved import StudySpec
from headloom.records.manifest import RUNS, SET_ASIDE
from headloom.records.results import StepTime, StudyRun
from headloom.records.runs import RESULT


def remarks(
    spec: StudySpec,
    folder: Path,
    runs: Sequence[StudyRun],
    timing: Mapping[str, StepTime],
    *,
    curves: Sequence[str],
    ends: Sequence[str],
) -> list[str]:
    """On the text that was read along the way, step times, failed runs, and runs that are kept and not counted.

    curves, ends: by which rules the finished runs measured along the way and at their end.
    """
    return [*_part(spec, curves, ends), *_timing(timing), *_failures(runs), *_kept(folder, runs)]


def _part(spec: StudySpec, curves: Sequence[str], ends: Sequence[str]) -> list[str]:
    if not set(curves) - {""} - set(ends):
        return []
    return [
        f"Along the runs, and so at {spec.reference}'s time, bits per byte are those of a fixed part of the validation "
        f"text ({spec.evaluation_bytes:,} bytes): to be compared with one another, not with those of the whole text."
    ]


def _timing(timing: Mapping[str, StepTime]) -> list[str]:
    """What joined later was not measured with the others."""
    return [
        f"{label} joined the study later: its step time was measured then, in turns with {times.beside}, and is "
        f"given in {times.beside}'s step time from before."
        for label, times in timing.items()
        if times.beside is not None
    ]


def _kept(folder: Path, runs: Sequence[StudyRun]) -> list[str]:
    used = {run.folder for run in runs}
    results = [path for place in (RUNS, SET_ASIDE) for path in sorted((folder / place).glob(f"*/{RESULT.name}"))]
    found = [place for path in results if (place := str(path.parent.relative_to(folder))) not in used]
    if not found:
        return []
    named = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return [
        f"Finished runs in the folder that are no part of the study as it was asked for last, kept and not counted "
        f"here: {len(found)} ({named})."
    ]


def _failures(runs: Sequence[StudyRun]) -> list[str]:
    failed = [run for run in runs if run.status == "failed"]
    if not failed:
        return []
    return [f"{len(failed)} of {len(runs)} runs failed; a difference is taken over the seeds that finished in both."]
