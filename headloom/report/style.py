"""What every figure shares: colours, marks, the theme on a light and on a dark ground, and what a section holds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import altair as alt

from headloom.records.reading import StudyRecords

# Distinguishable for most readers with colour blindness, and on a white and on a dark ground; from the tenth variant on
# the same hues in another lightness.
PALETTE = ["#7f8894", "#e8871e", "#2f8fd8", "#3aa66b", "#d1495b", "#9b6fd0", "#b59a1b", "#2fb3b3", "#c45ab3"]
PALETTE += ["#b9c0c9", "#a85a00", "#8cc4f0", "#1d7044", "#f09aa5", "#6a3fa8", "#dcc863", "#12787a", "#8a2f7b"]
STAR = "M0,-1L.235,-.324L.951,-.309L.38,.124L.588,.809L0,.4L-.588,.809L-.38,.124L-.951,-.309L-.235,-.324Z"
SHAPES = [
    "circle",
    "square",
    "diamond",
    "triangle-up",
    "triangle-down",
    "cross",
    "triangle-left",
    "triangle-right",
    STAR,
]
HEIGHT = 300
LABEL_LIMIT = 260
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Arial, sans-serif"
MIDDLE = "#808894"  # readable on both grounds: for what cannot follow the theme


@dataclass(frozen=True)
class Panel:
    """One drawing. `tab` is the word of the switch that shows it, where a section has several."""

    name: str
    tab: str
    spec: dict[str, Any]


@dataclass(frozen=True)
class Section:
    """A heading of the page: its drawings, the rows they are made of (its CSV file), and what to read with them.

    `datasets` are shared by the panels' specifications, which name them. `canvas`: too many marks to be elements of
    the page. `notes` are plain lines below the drawing.
    """

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]
    datasets: dict[str, list[dict[str, Any]]]
    rows: list[dict[str, Any]] = field(repr=False)
    notes: tuple[str, ...] = ()
    canvas: bool = False


def colour(study: StudyRecords, legend: bool = True) -> alt.Color:
    """One colour a variant, the same in every figure and in the tables."""
    labels = study.labels
    return alt.Color(
        "variant:N",
        scale=alt.Scale(domain=labels, range=[colour_of(place) for place in range(len(labels))]),
        legend=alt.Legend(title=None) if legend else None,
    )


def shape(study: StudyRecords) -> alt.Shape:
    """One mark a variant, for readers who cannot tell the colours."""
    labels = study.labels
    marks = [SHAPES[place % len(SHAPES)] for place in range(len(labels))]
    return alt.Shape("variant:N", scale=alt.Scale(domain=labels, range=marks), legend=alt.Legend(title=None))


def colour_of(place: int) -> str:
    """The colour of the study's variant number `place`."""
    return PALETTE[place % len(PALETTE)]


def named(name: str) -> alt.NamedData:
    """A section's data set, by name."""
    return alt.NamedData(name=name)


def finish(chart: Any, height: int | None = HEIGHT) -> dict[str, Any]:
    """The chart as a specification that fills its place's width (`height` None: a grid, whose parts have sizes)."""
    chart = chart.properties(background="transparent")
    if height is not None:
        chart = chart.properties(width="container", height=height)
    spec: dict[str, Any] = chart.to_dict()
    spec.pop("$schema", None)
    if height is not None:
        spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    return spec


def theme(dark: bool) -> dict[str, Any]:
    """A Vega configuration. The middle of the diverging colours is the ground, so that zero does not stand out."""
    ink, soft, line, ground = (
        ("#e6e9ee", "#a0a8b5", "#343a45", "#20252d") if dark else ("#1b1f26", "#59616e", "#dde1e7", "#f7f7f7")
    )
    low, high = ("#4fa3e6", "#f0883e") if dark else ("#1f6fb5", "#c9560f")
    return {
        "font": FONT,
        "view": {"stroke": line},
        "axis": {
            "labelColor": soft,
            "titleColor": ink,
            "gridColor": line,
            "domainColor": soft,
            "tickColor": soft,
            "labelFontSize": 12,
            "titleFontSize": 13,
            "titleFontWeight": 500,
        },
        "axisY": {"labelLimit": LABEL_LIMIT},
        "legend": {
            "orient": "top",
            "labelColor": ink,
            "titleColor": ink,
            "labelFontSize": 13,
            "titleFontSize": 13,
            "titleFontWeight": 500,
            "symbolStrokeWidth": 3,
            "symbolOpacity": 1,
            "labelLimit": LABEL_LIMIT,
        },
        "text": {"color": ink, "fontSize": 13},
        "title": {"color": MIDDLE, "fontSize": 12, "fontWeight": 500},
        "range": {"diverging": [low, ground, high]},
    }


def legend_columns(labels: list[str], width: int) -> int:
    """How many legend entries fit side by side; page.js counts in the same way.

    >>> legend_columns(["mha", "iha"], 720), legend_columns(["a label of thirty-one characters"], 360)
    (8, 1)
    """
    longest = max((len(label) for label in labels), default=1)
    return max(1, min(8, width // (34 + min(LABEL_LIMIT, 8 * longest))))
