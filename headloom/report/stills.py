"""The figures without a browser: SVG and PNG files, and what the page shows where no script runs."""

from __future__ import annotations

import base64
import re
from functools import cache
from typing import Any

from headloom.report.style import Panel, Section, legend_columns, theme

WIDTH = 720
LARGE = 300_000


@cache
def bundle() -> str:
    """Vega, Vega-Lite and vega-embed in one script, for the Vega-Lite version Altair writes."""
    import vl_convert

    text = vl_convert.javascript_bundle(snippet=None, vl_version=_vl_version())  # type: ignore[arg-type]
    # Within a script element these two would end it or hide what follows; inside a string both spellings are equal.
    return re.sub("</(script)", r"<\\/\1", text, flags=re.IGNORECASE).replace("<!--", "<\\!--")


@cache
def _vl_version() -> str:
    import altair

    return ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])


def still(section: Section, panel: Panel, labels: list[str]) -> dict[str, Any]:
    """The panel as a specification that stands alone: with its data, a width, and the light theme."""
    config = theme(dark=False)
    config["legend"]["columns"] = legend_columns(labels, WIDTH)
    spec = {**panel.spec, "datasets": section.datasets, "background": "white", "config": config, "padding": 12}
    if "width" in spec:
        spec |= {"width": WIDTH, "autosize": {"type": "pad"}}
    return spec


def svg(spec: dict[str, Any]) -> str:
    import vl_convert

    text = vl_convert.vegalite_to_svg(spec, vl_version=_vl_version(), allowed_base_urls=[])
    # Vega numbers its clip paths on and on within a process; numbered from 0, equal figures are equal files.
    numbers: dict[str, int] = {}
    return re.sub(
        r'(id="|url\(#)(clip|gradient_)(\d+)',
        lambda found: f"{found[1]}{found[2]}{numbers.setdefault(found[2] + found[3], len(numbers))}",
        text,
    )


def png(drawn: str, scale: float = 2.0) -> bytes:
    """The SVG text as a picture."""
    import vl_convert

    return vl_convert.svg_to_png(drawn, scale=scale)


def data_address(drawn: str) -> str:
    """The SVG text as a data: address; as a PNG where it has so many marks that this is smaller."""
    if len(drawn) > LARGE:
        return "data:image/png;base64," + base64.b64encode(png(drawn, 1.0)).decode()
    return "data:image/svg+xml;base64," + base64.b64encode(drawn.encode()).decode()
