"""report.html: one file with its own drawing library, readable in light and dark, on a desk and on a telephone.

Names in a study (variants, files, options) are other people's text. They reach the page only through Jinja's
autoescape or as JSON with `<`, `>` and `&` spelled as escapes, and a content security policy lets no script run but
the two whose hashes it names, and nothing be fetched.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headloom.core.files import write_bytes, write_text
from headloom.records.manifest import FIGURES, REPORT
from headloom.records.reading import StudyRecords, read_study
from headloom.report import facts, stills, tables
from headloom.report.figures import all_sections
from headloom.report.style import Section, colour_of, theme

if TYPE_CHECKING:
    from markupsafe import Markup

STILLS = 900_000  # letters of the drawings for readers without scripts; what is beyond is named as a file
ABSENT = "(absent)"  # how results.json says that a variant has no such setting


def write_report(folder: Path | str) -> Path:
    """Write report.html and figures/*.svg, *.png, *.csv into a study folder; returns the page's path.

    Raises HeadloomError when the folder holds no study.
    """
    study = read_study(folder)
    sections = all_sections(study)
    place = study.folder / FIGURES
    place.mkdir(exist_ok=True)
    addresses: dict[str, str] = {}
    for section in sections:
        write_text(place / f"{section.name}.csv", _csv(section.rows))
        for panel in section.panels:
            drawn = stills.svg(stills.still(section, panel, study.labels))
            write_text(place / f"{panel.name}.svg", drawn)
            write_bytes(place / f"{panel.name}.png", stills.png(drawn))
            address = stills.data_address(drawn)
            if sum(map(len, addresses.values())) + len(address) <= STILLS:
                addresses[panel.name] = address
    page = study.folder / REPORT
    write_text(page, render(study, sections, addresses))
    return page


def render(study: StudyRecords, sections: list[Section], addresses: dict[str, str]) -> str:
    """The page's text. `addresses` are the panels' stills as data: addresses, by name; one that is absent
    is shown as its file's name."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("headloom.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.filters["name"] = _breakable
    bundle, script = stills.bundle(), _asset("page.js")
    results = study.results
    failed, more_failed = facts.failures(study)
    return environment.get_template("page.html.j2").render(
        kicker=facts.kicker(study),
        title=facts.title(study),
        question=study.manifest.question,
        banner=facts.banner(study),
        in_short=facts.in_short(study),
        headlines=[line for line in (results.summary, results.time_summary) if line] or results.headlines,
        warnings=results.warnings,
        tables=[
            ("What was found", "Results of every variant", *_table(tables.found_table(study))),
            ("How sure it is", "Intervals of every difference", *_table(tables.interval_table(study))),
            ("What it cost", "Size and costs of every variant", *_table(tables.cost_table(study))),
        ],
        kinds={"verdict": "verdict", "options": "text", "state": "text"},
        colours={label: colour_of(place) for place, label in enumerate(study.labels)},
        table_notes=[*results.notes, *facts.how_read(study)],
        failed=failed,
        more_failed=more_failed,
        sections=sections,
        addresses=addresses,
        labels=study.labels,
        config_differences=[
            (key, [_setting(values.get(label, ABSENT)) for label in study.labels])
            for key, values in results.config_differences.items()
        ],
        common=[(key, tables.setting_text(value)) for key, value in results.common.items()],
        runs=_table(facts.runs(study)),
        facts=facts.facts(study),
        command=study.manifest.command,
        version=study.manifest.versions.get("headloom", ""),
        style=Markup(_asset("page.css")),
        figure_data=Markup(inert_json(_drawings(study, sections))),
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


def _drawings(study: StudyRecords, sections: list[Section]) -> dict[str, Any]:
    """What page.js draws from."""
    return {
        "themes": {"light": theme(dark=False), "dark": theme(dark=True)},
        "longest": max((len(label) for label in study.labels), default=1),
        "sections": [
            {
                "datasets": section.datasets,
                "renderer": "canvas" if section.canvas else "svg",
                "panels": {panel.name: panel.spec for panel in section.panels},
            }
            for section in sections
        ],
    }


def _table(found: tuple[list[str], list[tables.Row]]) -> tuple[list[str], list[tuple[str, list[str]]]]:
    names, rows = found
    return names, [(row.verdict, [row.cells[0], *map(_keep_together, row.cells[1:])]) for row in rows]


def _keep_together(cell: str) -> str:
    """A number with its spread, and a factor with its sign, do not break over lines."""
    for sign in (" ± ", " x ", " x)", " to ", " k", " M", " G", " T", " P", " ms"):
        cell = cell.replace(sign, sign.replace(" ", "\u00a0"))
    return cell


def _breakable(label: str) -> Markup:
    """A variant's name, which may break over lines after `:`, `_` and `=`."""
    from markupsafe import Markup

    return Markup("<wbr>").join(re.split(r"(?<=[:_=])", label))


def _setting(value: Any) -> str:
    return "-" if value == ABSENT else tables.setting_text(value)


def _csv(rows: list[dict[str, Any]]) -> str:
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def _asset(name: str) -> str:
    return files("headloom.report").joinpath(name).read_text(encoding="utf-8")


def _csp_hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
