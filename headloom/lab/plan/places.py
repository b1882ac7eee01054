"""What the files and folders inside a study's folder are called."""

from __future__ import annotations

import re

from headloom.lab.spec.resolved import StudySpec
from headloom.records.manifest import RUNS


def slug(label: str) -> str:
    """A label as a folder's name: letters, digits and `._=-`.

    >>> slug("iha:order=token:pseudo_heads=2")
    'iha-order=token-pseudo_heads=2'
    """
    return re.sub(r"[^A-Za-z0-9._=-]+", "-", label).strip("-.") or "variant"


def run_path(label: str, seed: int, learning_rate: float | None = None) -> str:
    """A run's folder inside the study's: runs/<variant>-seed<k>, with -lr<rate> before the seed where rates differ."""
    rate = "" if learning_rate is None else f"-lr{learning_rate:g}"
    return f"{RUNS}/{slug(label)}{rate}-seed{seed}"


def folder_of(spec: StudySpec, label: str, seed: int, learning_rate: float) -> str:
    """The same for a run of a study; the rate stands in the name where the study has a grid of them."""
    return run_path(label, seed, learning_rate if spec.has_grid else None)
