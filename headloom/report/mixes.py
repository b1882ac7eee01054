"""What a mechanism shows of its learned weights, as heat maps: after training, and the change from the start.

A run's pictures.npz says what there is, with names for rows and columns; a folder from before there was one has
mixes.npz, without names and without the start. A grid of small maps a variant, bounded in maps and in cells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import altair as alt
import numpy as np

from headloom.core.errors import HeadloomError
from headloom.records.arrays import Array, WeightPicture, read_mixes, read_pictures
from headloom.records.reading import StudyRecords
from headloom.records.results import FinishedRun
from headloom.records.runs import MIXES, PICTURES
from headloom.report.style import Panel, Section, finish, named

PANELS, MAPS, LAYERS = 8, 24, 6
CELLS = 24_000  # of a variant's maps together; a larger weight stays in its file
WIDTH, MARGIN = 140, 62  # of a map, and of the names and the space beside it
LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")


@dataclass(frozen=True)
class Map:
    """One learned weight as a matrix: what it is called, what its rows and columns are, and what it was at the start
    (None: not recorded)."""

    layer: int
    name: str
    shape: tuple[int, ...]
    weight: np.ndarray
    start: np.ndarray | None = None
    rows: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    down: str = ""
    across: str = ""

    @property
    def change(self) -> Map | None:
        """The difference to the start, in place of the weight."""
        return None if self.start is None else replace(self, weight=self.weight - self.start)


def mixes(study: StudyRecords) -> Section | None:
    """Two panels a variant, of its first finished seed; None where no run left anything to show."""
    panels: list[Panel] = []
    datasets: dict[str, list[dict[str, Any]]] = {}
    rows, notes = [], []
    for label, run in _first_runs(study).items():
        maps = read_maps(study, run)
        if not maps:
            continue
        drawn = chosen(maps)
        changes = [change for m in drawn if (change := m.change) is not None]
        file = f"{run.folder}/{PICTURES if run.pictures else MIXES}"
        if len(panels) + 1 + bool(changes) > PANELS:
            notes.append(f"{label}: not drawn, for want of room; see {file}.")
            continue
        if len(drawn) < len(maps):
            layers = ", ".join(str(layer) for layer in sorted({m.layer for m in drawn})) or "none"
            notes.append(f"{label}: {len(drawn)} of {len(maps)} maps are drawn (layers {layers}); all are in {file}.")
        for tab, grid, what in ((label, drawn, "weight"), (f"{label}: change", changes, "change of the weight")):
            if grid:
                name = f"mixes-{len(panels) + 1}"
                spec, data = _grid(grid, name, what)
                panels.append(Panel(name, tab, spec))
                datasets |= data
        rows += [_summary(label, run.seed, m) for m in maps]
    if not rows:
        return None
    return Section(
        name="mixes",
        title="What the heads learned",
        caption=(
            "One map a learned weight and layer, of the first finished seed, after training and as the change from the "
            "start. Numbers count from 0; 3.1 is number 1 of head 3. Blue is negative, orange positive, zero has the "
            "ground's colour; the colour goes with the square root, so that small weights show. The scale is shared by "
            "the maps that are shown together."
        ),
        panels=tuple(panels),
        datasets=datasets,
        rows=rows,
        notes=tuple(notes),
        canvas=True,
    )


def _first_runs(study: StudyRecords) -> dict[str, FinishedRun]:
    first: dict[str, FinishedRun] = {}
    for run in study.finished:
        if run.pictures or run.mixes:
            first.setdefault(run.variant, run)
    return {label: first[label] for label in study.labels if label in first}


def read_maps(study: StudyRecords, run: FinishedRun) -> list[Map]:
    """What a run left to show, by name and layer; without a weight that is not finite, or a file that cannot be
    read."""
    place = study.place(run)
    try:
        if run.pictures:
            found = [_from_picture(key, picture) for key, picture in read_pictures(place).items()]
        else:
            found = [_from_mix(key, mix) for key, mix in read_mixes(place).items()]
    except HeadloomError:  # the page says the rest
        return []
    found = [m for m in found if m.weight.size and np.isfinite(m.weight).all()]
    names = list(dict.fromkeys(m.name for m in found))
    return sorted(found, key=lambda m: (names.index(m.name), m.layer))


def _from_picture(key: str, picture: WeightPicture) -> Map:
    layer, name = _named(key)
    names = picture.rows, picture.columns, picture.down, picture.across
    return Map(layer, name, picture.end.shape, picture.end, picture.start, *names)


def _from_mix(key: str, mix: Array) -> Map:
    """A mix by its first axis, without names."""
    layer, name = _named(key)
    weight = np.atleast_1d(mix)
    return Map(layer, name, weight.shape, weight.reshape(len(weight), -1))


def _named(key: str) -> tuple[int, str]:
    """The layer and the weight of a parameter's name: "model.layers.3.self_attn.q_mix.weight" is (3, "q_mix")."""
    layer = LAYER.search(key)
    parts = key[layer.end() :] if layer else key
    name = ".".join(part for part in parts.split(".") if part not in ("weight", "self_attn", "attn", "attention"))
    return int(layer[1]) if layer else 0, name


def chosen(maps: list[Map]) -> list[Map]:
    """The maps that are drawn: evenly spread layers, the first and the last among them, within the bounds."""
    layers, names = sorted({m.layer for m in maps}), list(dict.fromkeys(m.name for m in maps))
    held = {(m.name, m.layer): m for m in maps}
    for count in range(min(LAYERS, len(layers)), 0, -1):
        keep = [layers[round(i * (len(layers) - 1) / max(1, count - 1))] for i in range(count)]
        drawn = [held[key] for key in product(names, keep) if key in held]
        if len(drawn) <= MAPS and sum(m.weight.size for m in drawn) <= CELLS:
            return drawn
    few = [m for m in drawn if m.weight.size <= CELLS // MAPS][:MAPS]
    return few or [m for m in drawn if m.weight.size <= CELLS][:1]


def _summary(label: str, seed: int, m: Map) -> dict[str, Any]:
    w = m.weight
    values = {"mean": w.mean(), "sd": w.std(), "smallest": w.min(), "largest": w.max()}
    shown = {key: float(f"{value:.5g}") for key, value in values.items()}
    return {
        "variant": label,
        "seed": seed,
        "layer": m.layer,
        "mix": m.name,
        "shape": "x".join(map(str, m.shape)),
        **shown,
    }


def _grid(maps: list[Map], name: str, what: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    top = max(float(np.abs(m.weight).max()) for m in maps) or 1.0
    top = float(f"{top:.2g}")
    scale = alt.Scale(type="pow", exponent=0.5, domain=[-top, 0, top], range="diverging", interpolate="rgb")
    legend = alt.Legend(
        title=what, orient="top", gradientLength=200, format="~g", values=[-top, -top / 4, 0, top / 4, top]
    )
    charts, data = [], {}
    for place, m in enumerate(maps):
        height, width = m.weight.shape
        # One value a cell travels, and the names once; rows and columns are counted where the map is drawn.
        names = {
            "rows": m.rows or tuple(map(str, range(height))),
            "columns": m.columns or tuple(map(str, range(width))),
        }
        data[f"{name}-{place}"] = [{"weight": [float(f"{x:.3g}") for x in m.weight.ravel()], **names}]
        drawn_height = round(min(WIDTH, max(36, WIDTH * height / width)))
        charts.append(
            alt.Chart(named(f"{name}-{place}"))
            .transform_flatten(["weight"])
            .transform_window(cell="row_number()")
            .transform_calculate(
                row=f"datum.rows[floor((datum.cell - 1) / {width})]",
                column=f"datum.columns[(datum.cell - 1) % {width}]",
            )
            .mark_rect()
            .encode(
                x=alt.X("column:O", sort=None, axis=_axis(m.across), scale=alt.Scale(padding=0)),
                y=alt.Y("row:O", sort=None, axis=_axis(m.down), scale=alt.Scale(padding=0)),
                color=alt.Color("weight:Q", scale=scale, legend=legend),
                tooltip=["row:N", "column:N", alt.Tooltip("weight:Q", format="+.4f")],
            )
            .properties(
                width=WIDTH,
                height=drawn_height,
                title=alt.Title(f"{m.name}, layer {m.layer}", anchor="start", offset=4, limit=WIDTH),
            )
        )
    columns = _columns(len({m.layer for m in maps}), len({m.name for m in maps}))
    spec = finish(alt.concat(*charts, columns=columns, spacing=18).resolve_scale(color="shared"), None)
    # page.js lays fewer maps side by side where fewer fit
    spec["usermeta"] = {"columns": columns, "width": WIDTH, "margin": MARGIN if maps[0].down else 20}
    return spec, data


def _axis(title: str) -> alt.Axis | None:
    """Names as far as they have room; none for a map without."""
    if not title:
        return None
    small: dict[str, Any] = {"labelFontSize": 8, "titleFontSize": 9, "titlePadding": 2, "labelPadding": 2}
    return alt.Axis(title=title, labelOverlap="greedy", labelAngle=0, ticks=False, domain=False, **small)


def _columns(layers: int, names: int) -> int:
    """Maps side by side: the layers of one mix, or of as many as fit and leave no row short."""
    side_by_side = max(1, LAYERS // layers)
    while names % side_by_side:
        side_by_side -= 1
    return layers * side_by_side
