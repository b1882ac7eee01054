"""Learned mixes after training as heat maps: a grid of small maps a variant, bounded in maps and in cells."""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from itertools import product
from typing import Any

import altair as alt
import numpy as np

from headloom.report.records import Study
from headloom.report.style import Panel, Section, finish, named

VARIANTS, MAPS, LAYERS = 8, 24, 6
CELLS = 24_000  # of a variant's maps together; a larger weight stays in its file
WIDTH = 140
LAYER = re.compile(r"(?:^|\.)layers?\.(\d+)\.")


@dataclass(frozen=True)
class Map:
    """One learned mix as a matrix (first axis, all others)."""

    layer: int
    name: str
    shape: tuple[int, ...]
    weight: np.ndarray


def mixes(study: Study) -> Section | None:
    """One panel a variant, of its first finished seed; None where no run left mixes."""
    panels: list[Panel] = []
    datasets: dict[str, list[dict[str, Any]]] = {}
    rows, notes = [], []
    for label, run in _first_runs(study).items():
        maps = read_maps(study, run)
        if not maps:
            continue
        if len(panels) == VARIANTS:
            notes.append(f"{label}: not drawn (at most {VARIANTS} variants are); see {run['folder']}/mixes.npz.")
            continue
        drawn = chosen(maps)
        name = f"mixes-{len(panels) + 1}"
        if len(drawn) < len(maps):
            layers = ", ".join(str(layer) for layer in sorted({m.layer for m in drawn})) or "none"
            notes.append(
                f"{label}: {len(drawn)} of {len(maps)} maps are drawn (layers {layers}); "
                f"all are in {run['folder']}/mixes.npz."
            )
        if drawn:
            spec, data = _grid(drawn, name)
            panels.append(Panel(name, label, spec))
            datasets |= data
        rows += [_summary(label, run["seed"], m) for m in maps]
    if not rows:
        return None
    return Section(
        name="mixes",
        title="Mixes after training",
        caption=(
            "One map a mix and layer, of the first finished seed: rows are the weight's first axis, columns the "
            "others. Blue is negative, orange positive, zero has the ground's colour; the colour goes with the square "
            "root, so that small weights show. The scale is shared by the maps of a variant."
        ),
        panels=tuple(panels),
        datasets=datasets,
        rows=rows,
        notes=tuple(notes),
        canvas=True,
    )


def _first_runs(study: Study) -> dict[str, dict[str, Any]]:
    first: dict[str, dict[str, Any]] = {}
    for run in study.finished:
        if run.get("mixes"):
            first.setdefault(run["variant"], run)
    return {label: first[label] for label in study.labels if label in first}


def read_maps(study: Study, run: dict[str, Any]) -> list[Map]:
    """The mixes a run left, by name and layer; without a weight that is not finite, or a file that cannot be read."""
    found = []
    try:
        path = study.folder / run["folder"] / "mixes.npz"
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as saved:
            for key in saved.files:
                weight = np.asarray(saved[key], dtype=np.float32)
                if weight.ndim and weight.size and np.isfinite(weight).all():
                    layer = LAYER.search(key)
                    name = ".".join(part for part in key.split(".")[-3:] if part not in ("weight", "self_attn"))
                    matrix = weight.reshape(weight.shape[0], -1)
                    found.append(Map(int(layer[1]) if layer else 0, name, weight.shape, matrix))
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        return []
    names = list(dict.fromkeys(m.name for m in found))
    return sorted(found, key=lambda m: (names.index(m.name), m.layer))


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


def _grid(maps: list[Map], name: str) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    top = max(float(np.abs(m.weight).max()) for m in maps) or 1.0
    top = float(f"{top:.2g}")
    scale = alt.Scale(type="pow", exponent=0.5, domain=[-top, 0, top], range="diverging", interpolate="rgb")
    legend = alt.Legend(
        title="weight", orient="top", gradientLength=200, format="~g", values=[-top, -top / 4, 0, top / 4, top]
    )
    charts, data = [], {}
    for place, m in enumerate(maps):
        height, width = m.weight.shape
        # One value a cell is all that travels; rows and columns are counted where the map is drawn.
        data[f"{name}-{place}"] = [{"weight": [float(f"{x:.3g}") for x in m.weight.ravel()]}]
        drawn_height = round(min(WIDTH, max(36, WIDTH * height / width)))
        charts.append(
            alt.Chart(named(f"{name}-{place}"))
            .transform_flatten(["weight"])
            .transform_window(cell="row_number()")
            .transform_calculate(row=f"floor((datum.cell - 1) / {width})", column=f"(datum.cell - 1) % {width}")
            .mark_rect()
            .encode(
                x=alt.X("column:O", axis=None, scale=alt.Scale(padding=0)),
                y=alt.Y("row:O", axis=None, scale=alt.Scale(padding=0)),
                color=alt.Color("weight:Q", scale=scale, legend=legend),
                tooltip=["row:Q", "column:Q", alt.Tooltip("weight:Q", format="+.4f")],
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
    spec["usermeta"] = {"columns": columns, "step": WIDTH + 20}
    return spec, data


def _columns(layers: int, names: int) -> int:
    """Maps side by side: the layers of one mix, or of as many as fit and leave no row short."""
    side_by_side = max(1, LAYERS // layers)
    while names % side_by_side:
        side_by_side -= 1
    return layers * side_by_side
