"""Tables, notes and figures of `headloom bench`, from a result made by hand."""

from __future__ import annotations

from headloom.report.bench import figure, kinds, markdown, notes, tables


def spread(median: float) -> dict[str, float]:
    return {"median": median, "low": 0.5 * median, "high": 2 * median}


def step(variant: str, seconds: float, ratio: float | None, **more):
    return {
        "variant": variant,
        "mode": "step",
        "size": "125M",
        "tokens": 2048,
        "batch_size": 4,
        "parameters": 1234567,
        "seconds": spread(seconds),
        "ratio": ratio and spread(ratio),
        "ratio_to": "mha",
        "ratio_to_own": spread(0.7),
        "tokens_per_second": 1000.0,
        "utilisation_exact": 0.61,
        "utilisation_full": 0.75,
        "interleaved": True,
        "compiled": False,
        **more,
    }


ROWS = [
    step("mha", 0.5, 1.0),
    step("mha", 0.25, 0.5, compiled=True, compile_seconds=12.34, graph_breaks={"a reason": 2}),
    step("i|ha", 2.0, None, interleaved=False, utilisation_exact=1.01),
]
RESULT = {
    "benchmark": "models",
    "machine": {"processor": "a processor", "freed_memory": "kept"},
    "versions": {"torch": "2.0"},
    "threads": 2,
    "dtype": "float32",
    "repeats": 3,
    "load_average": 3.21,
    "peak": {"flops_per_second": 5e10, "shape": [8, 9, 10]},
    "rows": ROWS,
    "skipped": [
        {"variant": "sas", "mode": "step", "size": "2.7B", "tokens": 2048, "batch_size": 1, "reason": "needs 9 GiB"}
    ],
}


def test_cells():
    (table,) = tables(RESULT)
    assert dict(zip(table.headings, table.rows[0], strict=True)) == {
        "variant": "mha",
        "mode": "step",
        "size": "125M",
        "tokens": "2,048",
        "batch": "4",
        "parameters": "1,234,567",
        "a step": "500 ms (250-1,000)",
        "times mha": "1.00 (0.50-2.00)",
        "tokens a second": "1,000",
        "use of peak": "61% (75%)",
        "times itself": "",
        "compiling": "",
    }
    compiled, alone = table.rows[1:]
    assert compiled[0] == "mha compiled" and compiled[-2:] == ("0.70 (0.35-1.40)", "12.3 s")
    assert alone[6:8] == ("2 s (1-4)", "")


def test_notes_say_what_must_be_known():
    assert notes(RESULT) == [
        "a processor, 2 threads; float32; torch 2.0; medians of 3 repetitions (quartiles)",
        "the machine was not quiet: load average 3.2 when it began",
        "peak: 50.0 GFLOP/s, the best matrix product of the same run (8 x 9 x 10); use: visible pairs (all pairs)",
        "mha: torch.compile broke the graph: a reason",
        "i|ha passes 100 %: the peak was measured at a slower moment; repeat when quiet",
        "i|ha, step, 125M: timed alone, since not all models fit memory together",
        "left out: sas, step, 2.7B, 2,048 tokens x 1: needs 9 GiB",
    ]
    text = markdown(RESULT)
    assert "| i\\|ha | step | 125M |" in text and text.endswith(
        "- left out: sas, step, 2.7B, 2,048 tokens x 1: needs 9 GiB\n"
    )


def test_what_is_drawn():
    spec = figure("step", ROWS).to_dict()
    assert [value["variant"] for value in spec["data"]["values"]] == ["mha", "mha compiled"], "i|ha has no ratio"
    assert [value["value"] for value in spec["data"]["values"]] == [1.0, 0.5]
    layer = {"variant": "mha", "batch_size": 1, "tokens": 64, "mode": "forward", "seconds": spread(3.0)}
    memory = {**layer, "peak_bytes": 2**21}
    decoded = {"variant": "mha", "batch_size": 1, "context": 32, "tokens_per_second": 7.0}
    for kind, row, value in (("speed", layer, 3.0), ("memory", memory, 2.0), ("decode", decoded, 7.0)):
        (drawn,) = figure(kind, [row]).to_dict()["data"]["values"]
        assert drawn["value"] == value and drawn["tokens"] in (32, 64)
    assert drawn["panel"] == "batch 1"


def test_kinds_of_rows():
    model = {"mode": "backward", "size": "125M"}
    both = {"benchmark": "speed", "rows": [{"mode": "forward"}, model, {"mode": "backward"}]}
    assert {kind: len(rows) for kind, rows in kinds(both).items()} == {"speed": 2, "step": 1}
