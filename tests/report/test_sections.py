"""What the figures are made of, from records with known numbers."""

import json

import numpy as np
import pytest

from headloom.records.reading import read_study
from headloom.report import mixes
from headloom.report.figures import all_sections, difference
from headloom.report.front import front, on_front
from headloom.report.held_out import held_out
from headloom.report.loss import loss
from headloom.report.rates import learning_rates
from headloom.report.sweep import sweep

RATES = (1e-3, 3e-3, 1e-2)
PAIRS = [("mha", "gqa"), ("mha", "iha"), ("mha", "sas"), ("gqa", "iha"), ("gqa", "sas"), ("iha", "sas")]


def change(folder, edit):
    """Rewrite results.json by `edit`; returns the study."""
    path = folder / "results.json"
    results = json.loads(path.read_text())
    edit(results)
    path.write_text(json.dumps(results))
    return read_study(folder)


@pytest.fixture
def whole_folder(tmp_path, make_study):
    make_study(tmp_path, ("mha", "gqa", "iha"), rates=RATES, mixes=("iha",), steps=40)
    return tmp_path


@pytest.mark.parametrize(
    ("points", "front_of"),
    [
        ([], []),
        ([(1.0, 1.0)], [0]),
        ([(2.0, 1.0), (1.0, 2.0)], [1, 0]),
        ([(1.0, 2.0), (1.0, 1.0), (2.0, 1.0)], [1]),  # dearer and no better, or no cheaper and worse
        ([(1.0, 1.0), (1.0, 1.0)], [0, 1]),  # neither beats the other
        ([(1.0, 5.0), (2.0, 6.0), (3.0, 4.0), (4.0, 4.5), (5.0, 3.0)], [0, 2, 4]),
    ],
)
def test_the_pareto_front(points, front_of):
    """Where nothing is known but the numbers."""
    rows = [{"variant": str(place), "time": time, "bits": bits} for place, (time, bits) in enumerate(points)]
    assert (on_front(rows, "time", {}) if rows else []) == front_of


def row(variant, time, bits):
    return {"variant": variant, "time": time, "bits": bits}


ROWS = [row("mha", 28.2, 2.821), row("gqa", 28.6, 2.642), row("iha", 46.7, 2.600), row("sas", 76.1, 2.624)]


@pytest.mark.parametrize(
    ("noise", "members"),
    [
        ({}, ["mha", "gqa", "iha"]),  # by the numbers alone: mha for its 0.4 ms
        # the measured times of mha and gqa overlap, the qualities do not
        ({("mha", "gqa"): (1, 0)}, ["gqa", "iha"]),
        # nothing is told apart in quality: what costs more time is off, and mha's 0.4 ms are no reason to stay
        ({(a, b): (0, 0 if (a, b) == ("mha", "gqa") else -1) for a, b in PAIRS}, ["gqa"]),
        # iha is better than gqa by more than noise
        ({(a, b): (int(b == "iha"), 0 if (a, b) == ("mha", "gqa") else -1) for a, b in PAIRS}, ["gqa", "iha"]),
        # what is told apart in time stays on, however little it is
        ({("mha", "gqa"): (0, -1)}, ["mha", "iha"]),
    ],
)
def test_noise_keeps_nobody_on_the_front(noise, members):
    told = {**noise, **{(b, a): (-bits, -time) for (a, b), (bits, time) in noise.items()}}
    assert [ROWS[place]["variant"] for place in on_front(ROWS, "time", told)] == members


def test_a_cycle_that_noise_makes_leaves_the_best():
    rows = [row("a", 3.0, 2.0), row("b", 2.0, 2.2), row("c", 2.5, 2.1)]
    told = {("a", "b"): (0, 1), ("b", "c"): (0, 0), ("c", "a"): (1, 0)}
    told |= {(b, a): (-bits, -time) for (a, b), (bits, time) in told.items()}
    assert [rows[place]["variant"] for place in on_front(rows, "time", told)] == ["a"]


def front_of_three(folder, **seconds):
    """The front of mha, gqa and iha that take so many seconds; iha is best and gqa worst."""

    def edit(results):
        for variant in results["variants"]:
            variant["planned_seconds"] = seconds[variant["label"]]
        for run in results["runs"]:
            run["bits_per_byte"] = {"mha": 2.4, "gqa": 2.5, "iha": 2.3}[run["variant"]]

    return front(change(folder, edit))


def test_the_front_marks_what_no_other_beats(whole_folder):
    section = front_of_three(whole_folder, mha=10.0, gqa=20.0, iha=30.0)
    means = {row["variant"]: row for row in section.datasets["quality-time-means"]}
    assert {label: row["front"] for label, row in means.items()} == {"mha": True, "gqa": False, "iha": True}
    assert means["gqa"]["time"] == pytest.approx(20.0)
    assert means["iha"]["bits"] == pytest.approx(2.3)
    assert [row["time"] for row in section.datasets["quality-time-front"]] == pytest.approx([10.0, 30.0])
    spec = next(panel.spec for panel in section.panels if panel.name == "quality-cache")
    assert spec["layer"][0]["encoding"]["x"]["scale"]["type"] == "log"  # a factor of nine
    spec = next(panel.spec for panel in section.panels if panel.name == "quality-time")
    assert "type" not in spec["layer"][0]["encoding"]["x"]["scale"]


def test_every_group_has_its_own_front(whole_folder):
    def edit(results):
        results["variants"][1]["against"] = None  # gqa is a reference too
        results["variants"][2]["planned_seconds"] = None  # a step was not measured: what the runs took counts
        for run in results["runs"]:
            run["train_seconds"], run["bits_per_byte"] = (1.0, 2.0) if run["variant"] == "mha" else (2.0, 2.1)

    means = front(change(whole_folder, edit)).datasets["quality-time-means"]
    assert {row["variant"]: row["group"] for row in means} == {"mha": "mha", "gqa": "gqa", "iha": "mha"}
    assert {row["variant"]: row["front"] for row in means} == {"mha": True, "gqa": True, "iha": False}
    assert [row["time"] for row in means] == pytest.approx([1.0, 2.0, 2.0])


def test_times_that_overlap_and_qualities_that_do_not_decide_by_their_intervals(whole_folder):
    def pair(variant, other, bits, time):
        return {
            "variant": variant,
            "other": other,
            "bits": {"n": 3, **dict(zip(("low", "mean", "high"), bits, strict=True))},
            "time": dict(zip(("low", "ratio", "high"), time, strict=True)),
        }

    def edit(results):
        results["pairs"] = [
            pair("mha", "gqa", (-0.2, -0.1, 0.01), (0.99, 1.01, 1.03)),  # gqa's 0.1 seconds are no reason to stay
            pair("mha", "iha", (0.05, 0.1, 0.2), (0.8, 0.9, 0.95)),
            pair("gqa", "iha", (0.1, 0.2, 0.3), (0.8, 0.9, 0.95)),
        ]

    change(whole_folder, edit)
    section = front_of_three(whole_folder, mha=10.0, gqa=9.9, iha=11.0)
    assert {row["variant"] for row in section.datasets["quality-time-means"] if row["front"]} == {"mha", "iha"}
    assert "the means alone decide" not in section.caption

    def nearer(results):  # now mha is not told apart from iha in quality, and iha not from gqa in time
        results["pairs"][1]["bits"]["low"] = -0.01
        results["pairs"][2]["time"]["high"] = 1.01

    change(whole_folder, nearer)
    section = front_of_three(whole_folder, mha=10.0, gqa=9.9, iha=11.0)
    assert {row["variant"] for row in section.datasets["quality-time-means"] if row["front"]} == {"mha"}


def test_at_equal_time_the_best_alone_is_on_the_front(whole_folder):
    section = front_of_three(whole_folder, mha=10.0, gqa=9.95, iha=10.05)
    assert section.notes[0] == "All variants are equal within 1.00 % in training time: no front to draw there."
    assert {row["variant"] for row in section.datasets["quality-time-means"] if row["front"]} == {"iha"}
    spec = next(panel.spec for panel in section.panels if panel.name == "quality-time")
    assert spec["layer"][0]["encoding"]["x"]["scale"]["zero"] is True


def test_quality_along_an_axis_that_is_swept(whole_folder):
    def edit(results):
        for place, variant in enumerate(results["variants"]):
            variant["settings"] = {"heads": 4**place, "batch_size": 8 if place else 4}
            variant["mechanism"], variant["options"] = ("mha", {"heads": 4**place}) if place < 2 else ("iha", {"P": 2})

    study = change(whole_folder, edit)
    section = sweep(study)
    assert [panel.tab for panel in section.panels] == ["heads"]  # two batch sizes are no line
    drawn = [(row["series"], row["value"], row["mean"]) for row in section.rows]
    means = [variant.bits_per_byte.mean for variant in study.variants]
    assert drawn == [("mha", 1, means[0]), ("mha", 4, means[1]), ("iha:P=2", 16, means[2])]
    assert section.panels[0].spec["layer"][0]["encoding"]["x"]["scale"]["type"] == "log"
    assert sweep(change(whole_folder, lambda results: results["variants"][0].update(settings={}))) is None


def test_a_cost_in_which_all_are_equal_has_no_front(study_folder):
    section = front(read_study(study_folder))
    assert [panel.name for panel in section.panels] == ["quality-time"]
    assert section.notes == (
        "All variants are equal within 0.01 % in parameters: no front to draw there.",
        "All variants are exactly equal in cache bytes: no front to draw there.",
    )


def test_loss_is_drawn_against_what_the_runs_counted(whole_folder):
    section = loss(read_study(whole_folder))
    assert [panel.tab for panel in section.panels] == ["steps", "tokens", "FLOPs", "seconds"]
    last = [row for row in section.datasets["loss-mean"] if row["variant"] == "iha"][-1]
    # 40 steps / 1.2 = 33; 1.6e9 FLOPs, 512 tokens and 0.15 seconds each
    assert (last["step"], last["tokens"], last["flops"]) == (33, 33 * 512, pytest.approx(33 * 1.6e9, rel=1e-4))
    assert last["seconds"] == pytest.approx(33 * 0.15)
    assert {row["seed"] for row in section.datasets["loss-seeds"]} == {0, 1, 2}


def test_held_out_quality_leads_and_is_drawn_against_what_the_runs_counted(whole_folder):
    study = read_study(whole_folder)
    section = held_out(study)
    assert [panel.tab for panel in section.panels] == ["steps", "tokens", "FLOPs", "seconds"]
    points = [row for row in section.datasets["held-out-mean"] if row["variant"] == "iha"]
    assert [point["step"] for point in points] == [8, 16, 24, 32]  # quarters of 33 steps
    # 1.6e9 FLOPs and 512 tokens a step; a step was measured to take 0.15 seconds
    assert points[-1] == {
        "variant": "iha", "step": 32, "tokens": 32 * 512, "flops": pytest.approx(32 * 1.6e9, rel=1e-4),
        "seconds": pytest.approx(32 * 0.15), "bits": pytest.approx(2.42 + 4 * np.exp(-32 / 9), abs=1e-5),
    }  # fmt: skip
    assert {row["seed"] for row in section.datasets["held-out-seeds"]} == {0, 1, 2}
    assert "the dashed line is the whole training time of mha" in section.caption
    rule = next(panel for panel in section.panels if panel.tab == "seconds").spec["layer"][0]
    assert rule["mark"]["type"] == "rule" and rule["data"]["values"] == [{"reference": "mha", "seconds": 6.0}]
    for path in whole_folder.glob("runs/*/metrics.jsonl"):  # a folder from before, or of --evaluations 0
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"curve"' not in line))
    assert held_out(study) is None


def test_only_the_chosen_runs_are_drawn(whole_folder):
    study = read_study(whole_folder)
    assert len(study.results.runs) == 27
    assert {run.learning_rate for run in study.chosen if run.variant == "mha"} == {3e-3}
    assert len(front(study).rows) == len(study.chosen) == 9


def test_the_rate_that_was_chosen_is_marked_and_the_edge_told(whole_folder):
    section = learning_rates(read_study(whole_folder))
    chosen = {row["variant"]: row["rate"] for row in section.rows if row["chosen"]}
    assert chosen == {"mha": 3e-3, "gqa": 3e-3, "iha": 1e-2}
    assert section.notes == ()  # the page's warnings say it
    row = section.rows[0]
    assert (row["low"], row["high"]) == pytest.approx((row["mean"] - 0.004, row["mean"] + 0.004))
    assert section.datasets["rates-failed"] == [{"variant": "iha", "rate": 1e-3, "failed": 1}]


def test_a_rate_at_which_every_run_failed_is_a_cross_without_a_mean(whole_folder):
    def edit(results):
        entry = results["variants"][0]["grid"][2]
        entry["selection_bits_per_byte"], entry["failed"] = {"n": 0, "mean": None, "sd": None, "values": {}}, 3

    section = learning_rates(change(whole_folder, edit))
    assert {"variant": "mha", "rate": 1e-2, "failed": 3} in section.datasets["rates-failed"]
    assert len([row for row in section.rows if row["variant"] == "mha"]) == 2


def test_seeds_are_paired_with_the_variant_they_are_compared_with(whole_folder):
    def edit(results):
        results["variants"][2]["against"] = "gqa"
        for variant, values in zip(results["variants"], ([1, 2], [3, 5], [4, 4]), strict=True):
            variant["bits_per_byte"]["values"] = {str(seed): value for seed, value in enumerate(values)}
        results["variants"][2]["bits_per_byte"]["values"]["7"] = 9.0  # gqa has no seed 7

    section = difference(change(whole_folder, edit))
    seeds = [(row["variant"], row["seed"], row["difference"]) for row in section.datasets["difference-seeds"]]
    assert seeds == [("gqa", 0, 2), ("gqa", 1, 3), ("iha", 0, 1), ("iha", 1, -1)]
    assert section.title == "Difference to each variant's reference"


def test_a_map_is_the_weight_by_its_first_axis(tmp_path, whole_folder):
    study = read_study(whole_folder)
    run = next(run for run in study.finished if run.mixes)
    weight = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    saved = {"model.layers.10.self_attn.q_mix.weight": weight, "model.layers.2.self_attn.q_mix.weight": weight[0]}
    saved["model.layers.3.self_attn.q_mix.weight"] = np.array([[np.nan]])
    np.savez(study.folder / run.folder / "mixes.npz", **saved)
    maps = mixes.read_maps(study, run)
    assert [(m.layer, m.name, m.shape) for m in maps] == [(2, "q_mix", (3, 4)), (10, "q_mix", (2, 3, 4))]
    assert maps[1].weight[1].tolist() == list(range(12, 24))
    section = mixes.mixes(study)
    names = {"rows": ("0", "1"), "columns": tuple(map(str, range(12)))}
    assert section.datasets["mixes-1-1"] == [{"weight": list(range(24)), **names}]
    assert section.rows[1] | {"mean": 11.5, "largest": 23.0, "shape": "2x3x4"} == section.rows[1]
    colours = section.panels[0].spec["concat"][0]["encoding"]["color"]["scale"]
    assert colours["domain"] == [-23.0, 0, 23.0]  # zero is in the middle, though no weight is negative


def test_pictures_are_labelled_and_show_the_change_from_the_start(whole_folder):
    def edit(results):
        for run in results["runs"]:
            run["pictures"] = run["variant"] == "mha" and run["chosen"]

    study = change(whole_folder, edit)
    run = next(run for run in study.finished if run.pictures)
    key = "model.layers.3.self_attn.head_q.0.weight"
    saved = {"start": [[1.0, 0.0], [0.0, 1.0]], "end": [[1.5, 0.0], [-0.25, 1.0]], "rows": ["0", "1"]}
    saved |= {"columns": ["0.0", "0.1"], "axes": ["to simulated head", "from head.tap"]}
    np.savez(study.folder / run.folder / "pictures.npz", **{f"{key}/{part}": np.array(v) for part, v in saved.items()})
    section = mixes.mixes(study)
    assert [panel.tab for panel in section.panels] == ["mha", "mha: change", "iha"]  # iha has the old kind of file
    after, changed = (section.datasets[f"mixes-{n}-0"][0] for n in (1, 2))
    assert after == {"weight": [1.5, 0.0, -0.25, 1.0], "rows": ("0", "1"), "columns": ("0.0", "0.1")}
    assert changed["weight"] == [0.5, 0.0, -0.25, 0.0]
    drawn = section.panels[1].spec["concat"][0]
    assert drawn["title"]["text"] == "head_q.0, layer 3"
    assert drawn["encoding"]["x"]["axis"]["title"] == "from head.tap"
    assert drawn["encoding"]["y"]["axis"]["title"] == "to simulated head"


@pytest.mark.parametrize(
    ("layers", "names", "cells", "drawn"),
    [
        (4, 4, 128, {0, 1, 2, 3}),
        (30, 4, 128, {0, 6, 12, 17, 23, 29}),
        (30, 8, 128, {0, 14, 29}),  # 24 maps
        (30, 4, 3000, {0, 29}),  # 24,000 cells
    ],
)
def test_maps_are_bounded_and_the_layers_spread(layers, names, cells, drawn):
    weight = np.zeros((1, cells), dtype=np.float32)
    maps = [mixes.Map(layer, f"mix{n}", weight.shape, weight) for n in range(names) for layer in range(layers)]
    kept = mixes.chosen(maps)
    assert {m.layer for m in kept} == drawn
    assert len(kept) == names * len(drawn)


@pytest.mark.parametrize(
    ("layers", "names", "columns"), [(1, 4, 4), (2, 4, 4), (3, 4, 6), (6, 4, 6), (2, 3, 6), (4, 7, 4)]
)
def test_maps_of_few_layers_share_a_row(layers, names, columns):
    assert mixes._columns(layers, names) == columns


def test_a_mix_too_large_to_draw_is_left_to_its_file(whole_folder):
    study = read_study(whole_folder)
    for run in study.finished:
        if run.mixes:
            np.savez(study.folder / run.folder / "mixes.npz", **{"layers.0.mix.weight": np.ones((200, 200))})
    section = mixes.mixes(study)
    assert section.panels == ()
    assert section.notes == ("iha: 0 of 1 maps are drawn (layers none); all are in runs/v2-lr0.01-seed0/mixes.npz.",)
    assert section.rows[0]["largest"] == 1.0  # the data beside the page know it


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut", b"\x80\x04pickle"])
def test_a_broken_mixes_file_leaves_the_rest_of_the_page(whole_folder, content):
    for path in whole_folder.glob("runs/*/mixes.npz"):
        path.write_bytes(content)
    names = [section.name for section in all_sections(read_study(whole_folder))]
    assert names == ["held-out", "difference", "quality", "learning-rates", "loss"]
