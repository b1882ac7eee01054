import json

import pytest

from headloom.records.reading import read_study
from headloom.report.curves import Point, mean_curve, smooth, stretch_width, training_curve
from headloom.report.figures import all_sections
from headloom.report.tables import duration, rows, short


def test_a_stretch_is_the_mean_of_its_steps_at_its_last_step():
    points = [Point(step, step / 10, loss) for step, loss in enumerate([4.0, 2.0, 3.0, 5.0, 7.0], start=1)]
    assert smooth(points, 2) == [Point(2, 0.2, 3.0), Point(4, 0.4, 4.0), Point(5, 0.5, 7.0)]
    assert smooth(points, 1) == points


@pytest.mark.parametrize(("steps", "width"), [(1, 1), (80, 1), (81, 2), (160, 2), (161, 3), (1000, 13)])
def test_at_most_eighty_points(steps, width):
    assert stretch_width(steps) == width
    assert len(smooth([Point(step, 0.0, 0.0) for step in range(1, steps + 1)], width)) <= 80


def test_the_mean_is_over_steps_that_all_seeds_have():
    a = [Point(1, 1.0, 4.0), Point(2, 2.0, 2.0)]
    b = [Point(1, 3.0, 6.0)]
    assert mean_curve([a, b]) == [Point(1, 2.0, 5.0)]
    assert mean_curve([]) == []


def test_only_whole_finite_training_lines_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    lines = [
        {"kind": "train", "step": 1, "seconds": 0.5, "loss": 2.0},
        {"kind": "eval", "step": 1, "seconds": 0.5, "bits_per_byte": 9.0},
        {"kind": "train", "step": 2, "seconds": 1.0, "loss": float("nan")},
        {"kind": "train", "step": 3, "seconds": 1.5, "loss": 1.0},
    ]
    rest = {"train": {"learning_rate": 1.0, "grad_norm": 1.0}, "eval": {"validation_loss": 1.0}}
    lines = [{**line, "tokens": 7, "flops": None, **rest[line["kind"]]} for line in lines]
    path.write_text("\n".join(json.dumps(line) for line in lines) + '\n{"kind": "train", "st')
    assert training_curve(tmp_path) == [Point(1, 0.5, 2.0, 7), Point(3, 1.5, 1.0, 7)]
    assert training_curve(tmp_path / "absent") == []


def test_every_variant_keeps_its_colour_in_every_figure(study_folder):
    panels = [panel for section in all_sections(read_study(study_folder)) for panel in section.panels]
    scales = set()
    for spec in (panel.spec for panel in panels):
        for layer in spec["layer"]:
            if "color" in layer["encoding"]:
                scale = layer["encoding"]["color"]["scale"]
                scales.add((tuple(scale["domain"]), tuple(scale["range"])))
    assert len(scales) == 1
    domain, colours = scales.pop()
    assert domain == ("mha", "gqa", "iha", "sas")
    assert len(set(colours)) == 4


def test_a_failed_run_is_told_in_the_table_and_left_out_of_the_mean(study_folder):
    results = json.loads((study_folder / "results.json").read_text())
    results["variants"][1]["failed"] = [{"seed": 2, "learning_rate": 3e-3, "reason": "its loss is nan"}]
    results["variants"][1]["bits_per_byte"]["n"] = 2
    (study_folder / "results.json").write_text(json.dumps(results))
    row = rows(read_study(study_folder))[1]
    assert row.cells[6].endswith(", 2 of 3 seeds")
    assert row.problem == "seed 2 failed: its loss is nan"


def test_one_seed_says_that_there_is_no_interval(study_folder):
    results = json.loads((study_folder / "results.json").read_text())
    for variant in results["variants"]:
        variant["bits_per_byte"] |= {"n": 1, "mean": 2.5, "sd": None}
        if variant["difference"]:
            variant["difference"] |= {
                "mean": 0.0123,
                "n": 1,
                "half_width": None,
                "low": None,
                "high": None,
                "verdict": "unknown",
            }
    (study_folder / "results.json").write_text(json.dumps(results))
    row = rows(read_study(study_folder))[2]
    assert row.cells[6:] == ("2.5000 (one seed)", "+0.0123 (one seed: no interval)", "-", "not known")
    assert row.verdict == "unknown"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (1000, "1 k"), (663_552, "663.6 k"), (1.5e12, "1.5 T"), (2e15, "2 P")]
)
def test_short_numbers(number, text):
    assert short(number) == text


@pytest.mark.parametrize(("value", "text"), [(0.1524, "152 ms"), (0.00731, "7.31 ms"), (1.2345, "1.23 s")])
def test_short_times(value, text):
    assert duration(value) == text
