"""report.html: one file with its own drawing library, readable in light and dark, on a desk and on a telephone.

Names in a study (variants, files, options) are other people's text. They reach the page only through Jinja's
autoescape or as JSON with `<`, `>` and `&` spelled as escapes, and a content security policy lets no script run but
the two whose hashes it names, and nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import tempfile
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from headloom.report import figures, tables
from headloom.report.records import Study, read_study, stretch_width

STILL_WIDTH = 720
ABSENT = "(absent)"  # how results.json says that a variant has no such setting
TITLES = {
    "difference": "Difference to {reference}",
    "loss-steps": "Loss against steps",
    "loss-seconds": "Loss against seconds",
    "quality-time": "Quality against time",
}


def write_report(folder: Path | str) -> Path:
    """Write report.html and figures/*.svg, *.png into a study folder; returns the page's path.

    Raises HeadloomError when the folder holds no study.
    """
    study = read_study(folder)
    specs = figures.all_figures(study)
    stills = {name: _svg(spec) for name, spec in specs.items()}
    place = study.folder / "figures"
    place.mkdir(exist_ok=True)
    for name, spec in specs.items():
        _write(place / f"{name}.svg", stills[name].encode())
        _write(place / f"{name}.png", _png(spec))
    page = study.folder / "report.html"
    _write(page, render(study, specs, stills).encode())
    return page


def render(study: Study, specs: dict[str, dict[str, Any]], stills: dict[str, str]) -> str:
    """The page's text. `specs` are Vega-Lite specifications by name, `stills` the same figures as SVG."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("headloom.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    bundle, script = _bundle(), _asset("page.js")
    reference = study.results["reference"]
    captions = _captions(study)
    shown = [
        {
            "name": name,
            "title": TITLES[name].format(reference=reference),
            "caption": captions[name],
            "svg": base64.b64encode(stills[name].encode()).decode(),
        }
        for name in specs
    ]
    return environment.get_template("page.html.j2").render(
        title=f"{', '.join(study.labels)} on {study.study['data']['title']}",
        banner=_banner(study),
        headlines=study.results["headlines"],
        columns=tables.columns(reference),
        rows=[
            {
                "label": row.label,
                "cells": [_keep_together(cell) for cell in row.cells],
                "verdict": row.verdict,
                "problem": row.problem,
                "colour": figures.PALETTE[place % len(figures.PALETTE)],
            }
            for place, row in enumerate(tables.rows(study))
        ],
        table_notes=study.results["notes"],
        figures=shown,
        labels=study.labels,
        config_differences=[
            (key, ["-" if values[label] == ABSENT else tables.show(values[label]) for label in study.labels])
            for key, values in study.results["config_differences"].items()
        ],
        common=[(key, tables.show(value)) for key, value in study.results["common"].items()],
        runs=_runs(study),
        facts=_facts(study),
        command=study.study["command"],
        version=study.study["versions"].get("headloom", ""),
        style=Markup(_asset("page.css")),
        figure_data=Markup(inert_json(specs)),
        bundle=Markup(bundle),
        script=Markup(script),
        script_hashes=[Markup(_csp_hash(bundle)), Markup(_csp_hash(script))],
    )


def inert_json(value: Any) -> str:
    """JSON that is safe inside a script element: no `<`, `>`, `&` nor a line separator stands in it literally.

    >>> inert_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _keep_together(cell: str) -> str:
    """A number with its spread, and a factor with its sign, do not break over lines."""
    for sign in (" ± ", " x)", " k", " M", " G", " ms"):
        cell = cell.replace(sign, sign.replace(" ", "\u00a0"))
    return cell


def _banner(study: Study) -> str:
    runs = study.results["runs"]
    failed = sum(run["status"] == "failed" for run in runs)
    waiting = sum(run["status"] == "waiting" for run in runs)
    parts = []
    if waiting:
        parts.append(f"{waiting} of {len(runs)} runs have not been made yet; the same command goes on with them.")
    if failed:
        parts.append(f"{failed} of {len(runs)} runs failed; the table says which and why.")
    return " ".join(parts)


def _captions(study: Study) -> dict[str, str]:
    width = stretch_width(study.study["spec"]["steps"])
    averaged = "every recorded loss" if width == 1 else f"the mean loss of {width} steps"
    curve = (
        f"Each point is {averaged}; thin lines are seeds, the thick line is their mean. "
        "The first losses run off the top so that the ends can be told apart."
    )
    return {
        "difference": (
            "Paired by seed; the bar is the 95 % t interval of the mean. It is not corrected for several comparisons; "
            "the sentences and the table's verdicts are (Holm)."
        ),
        "loss-steps": curve,
        "loss-seconds": curve + " Seconds are each run's own training time on this machine, without evaluation.",
        "quality-time": (
            "Small marks are runs, one a seed; the large mark is their mean. Every run makes the same number of steps, "
            "so a mark further right paid more time for them."
        ),
    }


def _runs(study: Study) -> list[dict[str, str]]:
    shown = []
    for run in study.results["runs"]:
        done = run["status"] == "finished"
        reason = run.get("reason")
        shown.append(
            {
                "variant": run["variant"],
                "seed": str(run["seed"]),
                "state": f"{run['status']}: {reason}" if reason else run["status"],
                "bits": f"{run['bits_per_byte']:.5f}" if done else "-",
                "perplexity": f"{run['perplexity']:.4f}" if done and run["perplexity"] is not None else "-",
                "seconds": f"{run['train_seconds']:.1f}" if done else "-",
            }
        )
    return shown


def _facts(study: Study) -> list[tuple[str, str]]:
    record = study.study
    data = record["data"]
    facts = [
        ("Quality", study.results["quality_text"] or "no run has finished yet"),
        ("Training", record["training_text"]),
        ("Step time", record["timing_text"]),
        (
            "Data",
            f"{data['title']} ({data['train_documents']:,} training and {data['validation_documents']:,} "
            f"validation documents; {data['train_tokens']:,} and {data['validation_tokens']:,} tokens)",
        ),
        ("Data fingerprint", data["fingerprint"]),
        ("Machine", ", ".join(f"{name}: {tables.show(value)}" for name, value in record["machine"].items())),
        ("Versions", ", ".join(f"{name} {value}" for name, value in record["versions"].items())),
        ("Study", f"{record['hash']}, begun {record['started']}"),
    ]
    return facts


@cache
def _bundle() -> str:
    """Vega, Vega-Lite and vega-embed in one script, for the Vega-Lite version Altair writes."""
    import vl_convert

    text = vl_convert.javascript_bundle(snippet=None, vl_version=_vl_version())  # type: ignore[arg-type]
    # Within a script element these two would end it or hide what follows; inside a string both spellings are equal.
    return re.sub("</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")


@cache
def _vl_version() -> str:
    import altair

    return ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def _still(spec: dict[str, Any]) -> dict[str, Any]:
    return {**spec, "width": STILL_WIDTH, "background": "white", "autosize": {"type": "pad"}}


def _svg(spec: dict[str, Any]) -> str:
    import vl_convert

    text = vl_convert.vegalite_to_svg(_still(spec), vl_version=_vl_version(), allowed_base_urls=[])
    # Vega numbers its clip paths on and on within a process; numbered from 0, equal figures are equal files.
    numbers: dict[str, int] = {}
    return re.sub(
        r'(id="|url\(#)clip(\d+)', lambda found: f"{found[1]}clip{numbers.setdefault(found[2], len(numbers))}", text
    )


def _png(spec: dict[str, Any]) -> bytes:
    import vl_convert

    return vl_convert.vegalite_to_png(_still(spec), vl_version=_vl_version(), scale=2.0, allowed_base_urls=[])


def _asset(name: str) -> str:
    return files("headloom.report").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _write(path: Path, content: bytes) -> None:
    """Replace `path` in one step, so that a reader never sees half a file."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
