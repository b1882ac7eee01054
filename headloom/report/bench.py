"""What `headloom bench` found, as tables and figures. Every number is one that the result holds."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headloom.core.files import write_bytes, write_json, write_text

Row = Mapping[str, Any]
Column = tuple[str, Callable[[Row], str]]


@dataclass(frozen=True)
class Table:
    """Headings and text cells of one kind of rows; the first column is words, the rest are numbers."""

    kind: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def tables(result: Mapping[str, Any]) -> list[Table]:
    """One table for each kind of rows that the result has."""
    found = []
    for kind, rows in kinds(result).items():
        columns = _columns(kind, rows)
        cells = tuple(tuple(show(row) for _, show in columns) for row in rows)
        found.append(Table(kind, tuple(heading for heading, _ in columns), cells))
    return found


def kinds(result: Mapping[str, Any]) -> dict[str, list[Row]]:
    """Rows by what they are of: "speed", "memory" or "decode" of a layer, "step" of a model (in whichever mode)."""
    found: dict[str, list[Row]] = {}
    for row in result["rows"]:
        found.setdefault("step" if "size" in row else result["benchmark"], []).append(row)
    return found


def notes(result: Mapping[str, Any]) -> list[str]:
    """What has to be known beside the tables: machine, setting, what was left out, what looks wrong."""
    machine, versions = result["machine"], result["versions"]
    threads = f"{result['threads']} thread{'s' * (result['threads'] > 1)}"
    where = machine.get("accelerator", machine["processor"])
    lines = [f"{where}, {threads}; {result['dtype']}; torch {versions['torch']}"]
    if result["benchmark"] != "memory":
        freed = "; freed memory returned to the system" if machine.get("freed_memory") == "returned" else ""
        lines[0] += f"; medians of {result['repeats']} repetitions (quartiles){freed}"
    lines += result.get("notes", ())
    if (result.get("load_average") or 0) > 1:
        lines.append(f"the machine was not quiet: load average {result['load_average']:.1f} when it began")
    if result.get("interrupted"):
        lines.append("interrupted: what stands here is all that was measured until then")
    peak = result.get("peak")
    if peak:
        lines.append(
            f"peak: {peak['flops_per_second'] / 1e9:,.1f} GFLOP/s, the best matrix product of the same run "
            f"({' x '.join(map(str, peak['shape']))}); use: visible pairs (all pairs)"
        )
    for row in result["rows"]:
        if (row.get("utilisation_exact") or 0) > 1:
            lines.append(f"{row['variant']} passes 100 %: the peak was measured at a slower moment; repeat when quiet")
        for found in row.get("differences", ()):
            lines.append(_difference(row["variant"], found))
        if row.get("graph_breaks"):
            lines.append(f"{row['variant']}: torch.compile broke the graph: {'; '.join(row['graph_breaks'])}")
        if row.get("interleaved") is False:
            lines.append(
                f"{row['variant']}, {row['mode']}, {row['size']}: timed alone, since not all models fit memory together"
            )
    for left in result.get("skipped", ()):
        point = f"{left['mode']}, {left['size']}, {left['tokens']:,} tokens x {left['batch_size']}"
        lines.append(f"left out: {left['variant']}, {point}: {left['reason']}")
    return list(dict.fromkeys(lines))


def markdown(result: Mapping[str, Any]) -> str:
    """The tables and notes, to be pasted into a document."""
    lines: list[str] = []
    for table in tables(result):
        lines += [_line(table.headings), _line(["---"] + ["---:"] * (len(table.headings) - 1))]
        lines += [*(_line(row) for row in table.rows), ""]
    return "\n".join([*lines, *(f"- {note}" for note in notes(result))]) + "\n"


def write_data(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """bench.json and bench.md."""
    folder.mkdir(parents=True, exist_ok=True)
    data, text = folder / "bench.json", folder / "bench.md"
    write_json(data, result)
    write_text(text, markdown(result))
    return [data, text]


def write(result: Mapping[str, Any], folder: Path) -> list[Path]:
    """bench.json, bench.md, and a figure as SVG and PNG for each kind of rows."""
    paths = write_data(result, folder)
    for kind, rows in kinds(result).items():
        chart = figure(kind, rows)
        for ending, options in (("svg", {}), ("png", {"scale_factor": 2})):
            paths.append(folder / f"{kind}.{ending}")
            drawn = io.BytesIO() if ending == "png" else io.StringIO()
            chart.save(drawn, format=ending, **options)
            content = drawn.getvalue()
            write_bytes(paths[-1], content if isinstance(content, bytes) else content.encode())
    return paths


def figure(kind: str, rows: Sequence[Row]) -> Any:
    """Against the tokens, one panel for each mode and batch size; steps as bars of their ratio, a panel each size."""
    import altair as alt

    from headloom.report.style import PALETTE

    labels = list(dict.fromkeys(map(_label, rows)))
    colour = alt.Color(
        "variant:N",
        scale=alt.Scale(domain=labels, range=[PALETTE[place % len(PALETTE)] for place in range(len(labels))]),
        legend=alt.Legend(title=None, orient="top", labelLimit=300),
    )
    values = [_drawn(kind, row) for row in rows if row.get("ratio", True)]
    base = alt.Chart(alt.Data(values=values))
    panel = alt.Facet("panel:N", title=None, sort=list(dict.fromkeys(value["panel"] for value in values)))
    if kind == "step":
        x = alt.X("value:Q", title=f"seconds of a whole model, in those of {rows[0]['ratio_to']}")
        y = alt.Y("variant:N", sort=labels, title=None, axis=alt.Axis(labelLimit=220))
        bars = base.mark_bar().encode(x=x, y=y, color=colour).properties(width=300, height=24 * len(labels))
        return bars.facet(panel, columns=3)
    titles = {
        "speed": f"seconds of {_timed(rows)}",
        "memory": "peak of memory (MiB)",
        "decode": "tokens a second through a layer",
    }
    ticks = alt.Axis(format=",d", values=sorted({value["tokens"] for value in values}))
    x = alt.X("tokens:Q", title="tokens", scale=alt.Scale(type="log", padding=16, nice=False), axis=ticks)
    y = alt.Y("value:Q", title=titles[kind], scale=alt.Scale(type="log"))
    lines = base.mark_line(point=alt.OverlayMarkDef(size=60)).encode(x=x, y=y, color=colour)
    return lines.properties(width=300, height=240).facet(panel, columns=3)


def _drawn(kind: str, row: Row) -> dict[str, Any]:
    """The variant, the tokens, the value and the panel of one row."""
    tokens = row["context"] if kind == "decode" else row["tokens"]
    if kind == "step":
        value, panel = row["ratio"]["median"], f"{row['mode']}, {row['size']}, {tokens:,} tokens, "
    elif kind == "decode":
        value, panel = row["tokens_per_second"], ""
    else:
        value, panel = row["seconds"]["median"] if kind == "speed" else row["peak_bytes"] / 2**20, f"{row['mode']}, "
    return {"variant": _label(row), "tokens": tokens, "value": value, "panel": f"{panel}batch {row['batch_size']}"}


def _columns(kind: str, rows: Sequence[Row]) -> list[Column]:
    batch: Column = ("batch", lambda row: str(row["batch_size"]))
    tokens: Column = ("tokens", lambda row: f"{row['tokens']:,}")
    mode: Column = ("mode", lambda row: row["mode"])
    variant: Column = ("variant", _label)
    usual = rows[0].get("ratio_to") or rows[0]["variant"]
    times: Column = (f"times {usual if len(usual) <= 16 else 'the first'}", lambda row: _ratios(row["ratio"]))
    use: Column = ("use of peak", _use)
    built: list[Column] = []
    if any(_other_form(row) for row in rows):
        built = [("times itself", lambda row: _ratios(row["ratio_to_own"]) if _other_form(row) else "")]
    if any(row.get("compiled") for row in rows):
        built += [("compiling", lambda row: f"{row['compile_seconds']:.1f} s" if row["compiled"] else "")]
    if kind == "speed":
        return [variant, mode, tokens, batch, (_timed(rows), lambda row: _time(row["seconds"])), times, use, *built]
    if kind == "memory":
        peak: Column = ("peak", lambda row: f"{row['peak_bytes'] / 2**20:,.1f} MiB")
        return [variant, mode, tokens, batch, peak, times, *built]
    if kind == "step":
        size: Column = ("size", lambda row: row["size"])
        learned: Column = ("parameters", lambda row: f"{row['parameters']:,}")
        rate: Column = ("tokens a second", lambda row: f"{row['tokens_per_second']:,.0f}")
        step: Column = ("a step", lambda row: _time(row["seconds"]))
        return [variant, mode, size, tokens, batch, learned, step, times, rate, use, *built]
    return [
        variant,
        ("context", lambda row: f"{row['context']:,}"),
        batch,
        ("prefill", lambda row: _time(row["prefill_seconds"])),
        (times[0], lambda row: _ratios(row["prefill_ratio"])),
        ("a token", lambda row: _time(row["token_seconds"])),
        (f"{times[0]} ", lambda row: _ratios(row["token_ratio"])),
        ("tokens a second", lambda row: f"{row['tokens_per_second']:,.0f}"),
        ("cache", lambda row: f"{row['cache_bytes'] / 1024:,.1f} KiB"),
    ]


def _timed(rows: Sequence[Row]) -> str:
    return "a layer's scores" if rows[0].get("part") == "scores" else "a layer"


def _label(row: Row) -> str:
    return f"{row['variant']} compiled" if row.get("compiled") else row["variant"]


def _time(spread: Mapping[str, float]) -> str:
    """Median and quartiles in seconds or milliseconds: "12.3 ms (12.1-12.9)"."""
    unit, factor = ("s", 1.0) if spread["median"] >= 1 else ("ms", 1000.0)
    values = (spread[key] * factor for key in ("median", "low", "high"))
    median, low, high = (f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values)
    return f"{median} {unit} ({low}-{high})"


def _ratios(found: Mapping[str, float] | float | None) -> str:
    """Of times with their quartiles, of bytes as it is."""
    if found is None:
        return ""
    if isinstance(found, float):
        return f"{found:.2f}"
    return f"{found['median']:.2f} ({found['low']:.2f}-{found['high']:.2f})"


def _other_form(row: Row) -> bool:
    """Compiled, or a straightforward form: a row to be read beside its own variant's."""
    return bool(row.get("compiled") or row.get("form_of"))


def _use(row: Row) -> str:
    exact, full = row.get("utilisation_exact"), row.get("utilisation_full")
    return "" if exact is None or full is None else f"{exact:.0%} ({full:.0%})"


def _difference(label: str, found: Mapping[str, Any]) -> str:
    if found["max_difference"] is None:
        return f"{label} against {found['variant']}: {found['reason']}"
    return (
        f"{label} against {found['variant']}, same weights: outputs differ by at most {found['max_difference']:.2e} "
        f"({found['relative']:.1e} of the largest)"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.strip().replace("|", "\\|") for cell in cells) + " |"
