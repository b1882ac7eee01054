"""Equal time, with invented clocks."""

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.plan.timing import Measured, match_time
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.study import Study


def spec(*variants, **values):
    budgets = [{"match": "time", "knob": "steps", **values.pop("budget", {})}]
    return resolve_study(Study.from_mapping({"variants": list(variants), "steps": 300, "budgets": budgets, **values}))


def clock(seconds):
    """A measurement in which a step takes seconds(label, shape)."""
    asked = []

    def measure(shapes):
        asked.append(list(shapes))
        return {
            label: {"median": seconds(label, shape), "low": 0.0, "high": 0.0, "repeats": 9}
            for label, shape in shapes.items()
        }

    return measure, asked


def match(found, seconds):
    measure, asked = clock(seconds)
    made = match_time(found, {v.label: v.shape for v in found.variants}, measure)
    return made.shapes, made.timing, made.matches, asked


def test_a_slower_step_gets_fewer_steps():
    shapes, timing, matches, asked = match(
        spec("mha", "iha:pseudo_heads=2"), lambda label, shape: 0.0125 if label == "iha" else 0.01
    )
    assert (shapes["mha"].steps, shapes["iha"].steps) == (300, 240)
    assert matches["iha"].target == matches["iha"].count == pytest.approx(3.0)
    assert timing["iha"]["median"] == 0.0125 and "mha" not in matches
    assert asked == [["mha", "iha"]]  # all together, in turns


@pytest.mark.parametrize(
    ("knob", "field", "expected"),
    [("layers", "num_layers", 5), ("heads", "num_heads", 20), ("F", "intermediate_size", 860)],
)
def test_a_knob_of_the_model_grows_to_the_targets_step_and_steps_close_the_gap(knob, field, expected):
    """A step takes as long as the knob is large; sas takes 2.52 times mha's."""
    found = spec(
        "mha", "sas", {"use": "mha", "label": "more", "knob": {"time": [knob, "steps"]}}, budget={"target": "sas"}
    )
    base = getattr(found.variant("mha").shape, field)
    shapes, _, matches, asked = match(
        found, lambda label, shape: 2.52 if label == "sas" else getattr(shape, field) / base
    )
    assert getattr(shapes["more"], field) == pytest.approx(expected, rel=0.02)
    assert shapes["sas"].steps == 300
    assert shapes["mha"].steps == round(300 * 2.52)
    for label in ("mha", "more"):
        assert abs(matches[label].relative) < 0.01
    assert len(asked) <= 6


def test_steps_that_grow_with_overhead_are_found_by_measuring_again():
    found = spec("mha", "sas", {"use": "mha", "label": "more", "knob": {"time": ["layers", "steps"]}})
    found = found.model_copy(update={"budgets": (found.budgets[0].model_copy(update={"target": "sas"}),)})
    shapes, _, _, _ = match(found, lambda label, shape: 7.1 if label == "sas" else 1 + shape.num_layers / 2)
    assert shapes["more"].num_layers == 12  # 1 + 12 / 2 = 7: nearest to 7.1


def test_what_cannot_be_matched_names_the_nearest():
    def seconds(label, shape):
        return 2.52 if label == "sas" else shape.num_layers / 2

    alone = spec("mha", "sas", {"use": "mha", "label": "more", "knob": {"time": "layers"}}, budget={"target": "sas"})
    with pytest.raises(HeadloomError, match=r"^more cannot be matched to 756 seconds .* 750 \(-0.8%\) at num_layers=5"):
        match(
            alone.model_copy(update={"budgets": (alone.budgets[0].model_copy(update={"tolerance": 0.005}),)}), seconds
        )
    few = spec("mha", "sas", steps=3)
    with pytest.raises(HeadloomError, match=r"sas cannot be matched .* \(-16.0%\) at steps=1; give more steps"):
        match(few, lambda label, shape: 2.52 if label == "sas" else 1.0)


def test_real_steps_are_measured_interleaved(text_file, monkeypatch):
    """The step that is timed is the run's own: its batch, its accumulation, its optimizer."""
    import torch

    from headloom.bench import speed
    from headloom.lab.plan.plan import make_plan
    from headloom.lab.plan.timing import step_times

    plan = make_plan(
        resolve_study(
            Study.from_mapping(
                {
                    "variants": ["mha", "gqa"],
                    "backbone": {"layers": 1, "width": 16, "heads": 4},
                    "tokens": 16,
                    "batch_size": 4,
                    "data": str(text_file),
                    "threads": 1,
                }
            )
        )
    )
    seen = []
    plain = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *a: seen.append(id(self)) or plain(self, *a))
    monkeypatch.setattr(speed.time, "perf_counter", iter(range(1000)).__next__)
    runs = {label: plan.run(label, 0).model_copy(update={"accumulation_steps": 2}) for label in ("mha", "gqa")}
    found = step_times(runs, plan.data, plan.tokenizer, repeats=3)
    assert len(seen) == 2 * (2 + 3) and seen[0::2] == [seen[0]] * 5 and seen[1::2] == [seen[1]] * 5
    assert found["mha"] == {"median": 1, "low": 1, "high": 1, "repeats": 3, "samples": [1, 1, 1]}


def test_what_joins_later_is_measured_beside_its_target_and_in_its_time_of_then():
    """mha's step took 0.02 s when it was measured, and takes 0.01 s now; sas takes twice mha's. Nothing known moves."""
    found = spec("mha", "iha:pseudo_heads=2", "sas")
    before = {"median": 0.02, "low": 0.02, "high": 0.02, "repeats": 9}
    shapes = {v.label: v.shape for v in found.variants}
    shapes["iha"] = shapes["iha"].model_copy(update={"steps": 123})
    known = Measured({"mha": before, "iha": before}, {label: shapes[label] for label in ("mha", "iha")}, {"iha": 7})
    measure, asked = clock(lambda label, shape: 0.02 if label == "sas" else 0.01)
    made = match_time(found, {v.label: v.shape for v in found.variants}, measure, known)
    assert asked == [["mha", "sas"]]
    assert made.timing["sas"]["median"] == pytest.approx(0.04) and made.timing["sas"]["beside"] == "mha"
    assert (made.shapes["mha"].steps, made.shapes["iha"].steps, made.shapes["sas"].steps) == (300, 123, 150)
    assert made.timing["iha"] == before and made.matches["iha"] == 7
    assert made.matches["sas"].target == pytest.approx(6.0) == made.matches["sas"].count
    again = Measured(made.timing, made.shapes, made.matches)
    assert match_time(found, shapes, measure, again) == again and len(asked) == 1


def test_what_joins_later_keeps_its_repetitions_ratios():
    found = spec("mha", "sas")
    before = {"median": 0.02, "low": 0.02, "high": 0.03, "repeats": 3, "samples": [0.02, 0.03, 0.02]}
    now = {"mha": [0.01, 0.01, 0.04], "sas": [0.03, 0.02, 0.1]}  # ratios 3, 2 and 2.5

    def measure(shapes):
        rows = {label: sorted(now[label]) for label in shapes}
        return {label: {"median": r[1], "low": r[0], "high": r[2], "samples": now[label]} for label, r in rows.items()}

    shapes = {v.label: v.shape for v in found.variants}
    made = match_time(found, shapes, measure, Measured({"mha": before}, {"mha": shapes["mha"]}))
    assert made.timing["sas"]["samples"] == pytest.approx([0.06, 0.06, 0.05])
    old = {key: value for key, value in before.items() if key != "samples"}
    made = match_time(found, shapes, measure, Measured({"mha": old}, {"mha": shapes["mha"]}))
    assert made.timing["sas"]["samples"] == []
