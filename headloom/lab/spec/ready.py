"""The ready studies (headloom/lab/studies/*.yaml), by name, and reading a study's file."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError, near


def ready_studies() -> dict[str, str]:
    """Name -> the YAML of every study that comes with the package."""
    folder = files("headloom.lab.spec").joinpath("studies")
    found = {item.name.removesuffix(".yaml"): item for item in folder.iterdir() if item.name.endswith(".yaml")}
    return {name: found[name].read_text(encoding="utf-8") for name in sorted(found)}


def read_study_file(path: str | Path) -> dict[str, Any]:
    """The mapping in a study's file, or in the ready study of that name; HeadloomError where there is none."""
    import yaml

    if not isinstance(path, str | Path):
        raise HeadloomError(f"a study is the path of its file, or a ready study's name, not {path!r}")
    place, ready = Path(path), ready_studies()
    if place.is_file():
        try:
            text = place.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise HeadloomError(f"'{path}' cannot be read: {error}") from None
    elif str(path) in ready:
        text = ready[str(path)]
    else:
        raise HeadloomError(
            f"'{path}' is neither a file nor a ready study.{near(str(path), ready)} Ready: {', '.join(ready)}"
        )
    try:
        found = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise HeadloomError(f"'{path}' is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise HeadloomError(f"'{path}' must hold a study's keys and values, not {type(found).__name__}")
    found.setdefault("name", place.stem)
    return found
