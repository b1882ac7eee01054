"""The whole laboratory on models that train in a second. One study is made and looked at from all sides."""

import json
from types import SimpleNamespace

import pytest

from headloom.core.errors import HeadloomError, RunError
from headloom.lab.compare import Comparison, compare, comparison_study
from headloom.lab.plan.plan import make_plan
from headloom.lab.results.statistics import paired_difference
from headloom.lab.run.progress import Progress
from headloom.lab.run.runner import Interrupted
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.resolved import identity
from headloom.lab.spec.sizes import get_size

TWO = "mha,iha:pseudo_heads=2"


class Told(Progress):
    def __init__(self):
        self.runs, self.steps, self.notes = [], [], []

    def run(self, name, number):
        label, _, seed = name.partition(" seed ")
        self.runs.append((label, int(seed)))

    def step(self, number, step, loss):
        self.steps.append((step, loss))

    def note(self, text):
        self.notes.append(text)


@pytest.fixture(scope="module")
def told():
    return Told()


@pytest.fixture(scope="module")
def made(small, told, tmp_path_factory):
    return compare(TWO, out=tmp_path_factory.mktemp("study") / "s", progress=told, **small)


def numbers(comparison):
    return {(run["variant"], run["seed"]): run["bits_per_byte"] for run in comparison.results["runs"]}


def test_every_run_is_made_seed_by_seed(made, told):
    assert told.runs == [("mha", 0), ("iha", 0), ("mha", 1), ("iha", 1)]
    assert len(told.steps) == 4 * 3
    for run in made.results["runs"]:
        assert run["status"] == "finished"
        folder = made.folder / run["folder"]
        result = json.loads((folder / "result.json").read_text())
        assert result["bits_per_byte"] == run["bits_per_byte"]
        losses = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in losses if line.get("kind") == "train"] == [1, 2, 3]
        config = json.loads((folder / "config.json").read_text())
        assert (config["seed"], config["threads"], config["steps"]) == (run["seed"], 1, 3)


def test_parameters_are_equal_and_are_those_of_the_trained_models(made):
    reference, other = made.results["variants"]
    assert reference["intermediate_size"] == get_size("tiny").intermediate_size
    assert other["intermediate_size"] < reference["intermediate_size"]
    assert abs(other["parameters"] / reference["parameters"] - 1) <= 0.005
    for run in made.results["runs"]:
        planned = reference if run["variant"] == "mha" else other
        assert run["parameters"] == planned["parameters"]


def test_the_result_is_computed_from_the_runs(made):
    reference, other = made.results["variants"]
    found = numbers(made)
    expected = paired_difference(
        {seed: found["iha", seed] for seed in (0, 1)}, {seed: found["mha", seed] for seed in (0, 1)}
    )
    assert other["difference"]["mean"] == expected.mean
    assert other["difference"]["half_width"] == expected.half_width
    assert other["bits_per_byte"]["mean"] == pytest.approx((found["iha", 0] + found["iha", 1]) / 2)
    assert reference["difference"] is None
    assert made.headlines[0].startswith("iha is ")
    assert "over 2 seeds at equal parameters (within 0.5 %)" in made.headlines[0]
    assert reference["step_time"]["median"] > 0
    assert other["step_ratio"] == other["step_time"]["median"] / reference["step_time"]["median"]


def test_every_variant_is_read_at_the_references_time(made):
    """Of three steps: after each of them, on all 1,024 bytes at most of the held-out text, and between them by time."""
    reference, other = made.results["variants"]
    curves = {}
    for run in made.results["runs"]:
        lines = (made.folder / run["folder"] / "metrics.jsonl").read_text().splitlines()
        points = [record for record in map(json.loads, lines) if record["kind"] == "curve"]
        assert [point["step"] for point in points] == [1, 2, 3]
        assert json.loads((made.folder / run["folder"] / "config.json").read_text())["evaluation_bytes"] == 1024
        curves[run["variant"], run["seed"]] = [point["bits_per_byte"] for point in points]
    at_end = {str(seed): curves["mha", seed][2] for seed in (0, 1)}
    assert reference["at_time"]["bits_per_byte"]["values"] == at_end
    ratio = reference["step_time"]["median"] / other["step_time"]["median"]
    step = 3 * ratio
    read = other["at_time"]
    assert read["step"] == pytest.approx(step) and read["seconds"] == 3 * reference["step_time"]["median"]
    for seed in (0, 1):
        curve = curves["iha", seed]
        before = max(1, min(2, int(step)))
        expected = curve[before - 1] + (step - before) * (curve[before] - curve[before - 1])
        expected = curve[2] if step >= 3 else expected
        if step >= 1:
            assert read["bits_per_byte"]["values"][str(seed)] == pytest.approx(expected)
    assert "bits per byte are those of a fixed part of the validation text (1,024 bytes)" in str(made.results["notes"])
    (pair,) = made.results["pairs"]
    assert (pair["variant"], pair["other"]) == ("mha", "iha") and pair["bits"]["n"] == 2
    assert pair["time"]["low"] <= pair["time"]["high"] and len(other["step_time"]["samples"]) == 9
    assert other["difference"]["more_seeds"] >= 0
    assert made.results["time_summary"] == "" or made.results["time_summary"] in made.headlines


def test_costs_are_of_the_whole_model(made):
    from headloom.costs.count import cost

    size = get_size("tiny")
    layer = cost("mha", tokens=16, hidden_size=size.hidden_size, num_heads=size.num_heads)
    reference = made.results["variants"][0]
    assert reference["attention_flops_per_token"] == size.num_layers * layer.flops_exact / 16
    # keys and values of all heads, 4 bytes a number
    assert reference["cache_bytes_per_token"] == size.num_layers * 2 * size.hidden_size * 4


def test_only_the_mechanism_its_options_and_the_width_differ(made):
    found = set(made.results["config_differences"])
    assert {"mechanism", "intermediate_size", "attention.pseudo_heads"} <= found
    assert all(key in ("mechanism", "intermediate_size") or key.startswith("attention.") for key in found)
    assert "attention.rope_theta" not in found
    assert made.results["common"]["steps"] == 3


def test_study_json_can_make_it_again(made):
    study = json.loads((made.folder / "study.json").read_text())
    assert study["command"].startswith("headloom compare --variants mha,iha:pseudo_heads=2 --size tiny --steps 3")
    assert study["resolved"]["spec"]["seeds"] == [0, 1]
    assert len(study["data"]["fingerprint"]) == 64
    assert {"torch", "transformers", "python"} <= set(study["versions"])
    assert study["machine"]["threads"] == 1
    assert set(study["timing"]) == {"mha", "iha"}


def test_results_csv_has_a_line_a_run(made):
    lines = (made.folder / "results.csv").read_text().splitlines()
    assert lines[0].startswith("variant,seed,status,bits_per_byte")
    assert [line.split(",")[:3] for line in lines[1:]] == [
        [label, str(seed), "finished"] for seed in (0, 1) for label in ("mha", "iha")
    ]
    assert float(lines[1].split(",")[3]) == numbers(made)["mha", 0]


def test_the_same_study_again_keeps_every_run(made, small):
    before = {path: path.stat().st_mtime_ns for path in made.folder.glob("runs/*/*")}
    timing = json.loads((made.folder / "study.json").read_text())["timing"]
    told = Told()
    again = compare(TWO, out=made.folder, progress=told, **small)
    assert told.runs == []
    assert {path: path.stat().st_mtime_ns for path in made.folder.glob("runs/*/*")} == before
    assert again.results == made.results
    assert json.loads((made.folder / "study.json").read_text())["timing"] == timing


def test_another_study_is_refused(made, small):
    before = (made.folder / "study.json").read_bytes()
    with pytest.raises(HeadloomError, match=r"holds another study \(steps 3 there, 4 here\), .*choose another --out"):
        compare(TWO, out=made.folder, **{**small, "steps": 4})
    assert (made.folder / "study.json").read_bytes() == before


def test_stopped_and_resumed_gives_the_same_numbers(made, small, tmp_path, monkeypatch):
    class Stop(Progress):
        def step(self, number, step, loss):
            self.seen = getattr(self, "seen", 0) + 1
            if self.seen == 5:  # the second step of the second run
                raise KeyboardInterrupt

    pages = []

    def write_report(folder):
        pages.append(json.loads((folder / "results.json").read_text())["status"])
        return folder / "page"

    monkeypatch.setattr("headloom.report.page.write_report", write_report)
    with pytest.raises(Interrupted, match=r"1 of 4 runs are finished and kept; to go on: headloom compare .* --out"):
        compare(TWO, out=tmp_path / "s", progress=Stop(), **{**small, "report": True})
    assert pages == ["partial"]
    kept = tmp_path / "s" / "runs" / "mha-seed0" / "result.json"
    written = kept.stat().st_mtime_ns
    assert (tmp_path / "s" / "runs" / "iha-seed0" / "metrics.jsonl").exists()  # what was cut stays readable
    told = Told()
    resumed = compare(TWO, out=tmp_path / "s", progress=told, **{**small, "report": True})
    assert told.runs == [("iha", 0), ("mha", 1), ("iha", 1)]
    assert kept.stat().st_mtime_ns == written
    assert numbers(resumed) == numbers(made)
    assert pages == ["partial", "complete"]


def test_a_failed_run_is_recorded_and_the_rest_goes_on(small, tmp_path, monkeypatch):
    import headloom.train.run as runs

    real = runs.train

    def train(run, data, tokenizer, folder, on_progress, **options):
        if run.seed == 1 and run.specs[0].mechanism == "mha":
            raise RunError("its loss is nan at learning rate 1e9")
        if run.seed == 0 and run.specs[0].mechanism == "iha":
            raise RuntimeError("not enough\nmemory")
        return real(run, data, tokenizer, folder, on_progress, **options)

    monkeypatch.setattr(runs, "train", train)
    comparison = compare(TWO, out=tmp_path / "s", **small)
    states = {(run["variant"], run["seed"]): run["status"] for run in comparison.results["runs"]}
    assert states == {("mha", 0): "finished", ("iha", 0): "failed", ("mha", 1): "failed", ("iha", 1): "finished"}
    assert [run["reason"] for run in comparison.failed] == [
        "RuntimeError: not enough memory",
        "its loss is nan at learning rate 1e9",
    ]
    assert comparison.results["status"] == "failed"
    assert comparison.results["variants"][1]["difference"]["n"] == 0
    assert comparison.headlines[0] == "iha cannot be compared with mha: no seed finished in both."
    assert any("2 of 4 runs failed" in note for note in comparison.results["notes"])
    assert "loss is nan" in (tmp_path / "s" / "results.csv").read_text()

    monkeypatch.setattr(runs, "train", real)  # asked for again, what failed is tried again
    told = Told()
    again = compare(TWO, out=tmp_path / "s", progress=told, **small)
    assert told.runs == [("iha", 0), ("mha", 1)]
    assert not again.failed


def test_a_diverging_loss_fails_the_run_and_leaves_it_readable(small, tmp_path):
    comparison = compare(TWO, out=tmp_path / "s", **{**small, "seeds": 1, "learning_rate": 1e30})
    assert len(comparison.failed) == 2
    for run in comparison.failed:
        assert "stopped at step" in run["reason"]
        assert "lower learning rate" in run["reason"]
        lines = (comparison.folder / run["folder"] / "metrics.jsonl").read_text().splitlines()
        assert all(record["loss"] > 0 for record in map(json.loads, lines) if record["kind"] == "train")


def test_one_seed_says_so(small, tmp_path):
    comparison = compare(TWO, out=tmp_path / "s", **{**small, "seeds": 1, "steps": 1})
    assert "one seed gives no interval" in comparison.headlines[0]
    assert comparison.results["variants"][1]["difference"]["half_width"] is None


def plan(variants, text_file, **changes):
    given = {"data": str(text_file), "tokenizer": "bytes", "threads": 1, "seeds": 1, **changes}
    return make_plan(resolve_study(comparison_study(variants, "tiny", **given), kind="compare"))


def test_the_default_four_match_within_half_a_percent(text_file):
    budgets = plan(None, text_file).costs()
    target = budgets["mha"]["parameters"]
    assert {label: abs(budget["parameters"] / target - 1) <= 0.005 for label, budget in budgets.items()} == {
        "mha": True,
        "gqa": True,
        "iha": True,
        "sas": True,
    }
    assert budgets["gqa"]["intermediate_size"] > budgets["mha"]["intermediate_size"]
    assert budgets["iha"]["cache_bytes_per_token"] == budgets["mha"]["cache_bytes_per_token"]


@pytest.mark.parametrize(
    ("variants", "part"),
    [
        ("mha,iha:rope_theta=none", "attention.rope_theta: mha 10000.0, iha None"),
        ("mha,gqa:window=8", "attention.window: mha None, gqa 8"),
        ("mha,sas:qkv_bias=true", "attention.qkv_bias: mha False, sas True"),
        ("iha:pseudo_heads=2,iha:pseudo_heads=2:order=virtual", "are the same"),
        ("mha,gqa:num_kv_heads=3", "gqa: num_kv_heads must divide num_heads"),
        ("mha,sas:kernel_size=4", "sas: kernel_size must be"),
        ("mha,sas:simulated_width=21", "sas: simulated_width must be"),
        ("mha,sas:simulated_heads=4096:simulated_width=512", "cannot be matched to"),
    ],
)
def test_unfair_and_impossible_studies_are_refused_before_training(text_file, variants, part):
    with pytest.raises(HeadloomError) as caught:
        plan(variants, text_file)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_that_all_variants_share_are_fair(text_file):
    made = plan("mha:window=8,gqa:window=8", text_file)
    assert made.configs["mha"]["attention"]["window"] == 8


def test_runs_of_a_seed_share_data_order_and_initial_weights(text_file):
    import torch

    from headloom.train.run import build

    made = plan("mha,iha:pseudo_heads=2", text_file)
    a, b = (build(made.run(label, 0), made.tokenizer).state_dict() for label in ("mha", "iha"))
    shared = [name for name in a if name in b and a[name].shape == b[name].shape]
    assert "model.embed_tokens.weight" in shared
    assert sum("q_proj" in name for name in shared) == get_size("tiny").num_layers
    assert all(torch.equal(a[name], b[name]) for name in shared)


def test_identity_follows_the_text_and_the_versions(text_file, tmp_path, monkeypatch):
    other = tmp_path / text_file.name
    other.write_text(text_file.read_text() + " more")
    first, second = plan("mha,gqa", text_file).resolved, plan("mha,gqa", other).resolved
    assert first["data"] != second["data"]
    assert identity(first) != identity(second)


def test_a_constant_state_is_said_beside_the_table(small, tmp_path):
    """linear: 0 bytes a token, and 2 layers x 8 heads x 16 x (16 + 1) float32 numbers a sequence, however long."""
    found = compare("mha,linear", **{**small, "steps": 1, "seeds": 1}, out=tmp_path / "s")
    variant = next(v for v in found.results["variants"] if v["label"] == "linear")
    assert variant["cache_bytes_per_token"] == 0 and variant["cache_constant_bytes"] == 2 * 8 * 16 * 17 * 4
    said = [note for note in found.results["notes"] if "a sequence, however long" in note]
    assert said == [
        "linear remembers 17,408 bytes a sequence, however long, besides what its tokens leave in the cache."
    ]


def test_what_people_should_know_of_the_data_is_said_first_and_recorded(small, tmp_path):
    rows = [f"the {i} foxes jump over {i * i % 97} dogs" for i in range(40)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "t.csv").write_text("text,body\n" + "".join(f"wrong,{row}\n" for row in rows))
    (tmp_path / "set" / "a.bin").write_bytes(b"\0")
    told = Told()
    given = {**small, "data": tmp_path / "set", "text_column": "body", "seeds": 1}
    found = compare(TWO, out=tmp_path / "s", progress=told, **given)
    first, second = found.results["notes"][:2]
    assert first == "left out of folder 'set': not UTF-8 text 1 (.bin 1)"
    assert "warning: little text" in second and told.notes[:2] == [first, second]
    study = json.loads((found.folder / "study.json").read_text())
    assert study["data"]["title"].endswith(f"40 documents, {sum(map(len, rows)):,} bytes")
    assert "--text-column body" in study["command"]
    with pytest.raises(HeadloomError, match="no 'text' column; it has: body"):
        (tmp_path / "set" / "t.csv").write_text("body\nx\n")
        compare(TWO, out=tmp_path / "t", **{**given, "text_column": None})


def test_a_tokenizer_that_loses_text_is_refused(small, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(
        models.WordLevel({w: i for i, w in enumerate(["?", "the", "quick", "fox", "over", "lazy", "box", "end"])}, "?")
    )
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token="end").save_pretrained(tmp_path / "words")
    with pytest.raises(HeadloomError, match=r"the tokenizer loses text: at least \d+"):
        compare(TWO, out=tmp_path / "s", **{**small, "tokenizer": tmp_path / "words"})
    assert not (tmp_path / "s").exists()


def test_a_comparison_shows_itself_shortly(made):
    text = repr(made)
    assert text.startswith("Comparison of mha, iha: 4 of 4 runs finished, in ")
    assert made.headlines[0] in text and len(text) < 2000
    found = made.frame()
    assert list(found.index) == ["mha", "iha"]
    assert found.loc["iha", "bits_per_byte.mean"] == made.results["variants"][1]["bits_per_byte"]["mean"]
    assert f"<td>{made.results['variants'][0]['bits_per_byte']['mean']:.4f}</td>" in made._repr_html_()


def test_what_a_notebook_shows_is_escaped(tmp_path):
    hostile = "<img src=x onerror=alert(1)>"
    quality = SimpleNamespace(mean=1.5, sd=None)
    variant = SimpleNamespace(label=hostile, bits_per_byte=quality, parameters=1234)
    record = SimpleNamespace(variants=[variant], runs=[], headlines=[hostile])
    shown = Comparison(tmp_path, record)._repr_html_()
    assert "<img" not in shown and "&lt;img" in shown and "<td>1,234</td>" in shown and "<td>-</td>" in shown


def test_progress_is_shown_unless_it_is_not_wanted(capsys):
    for progress, shown in ((None, True), (True, True), (False, False)):
        with pytest.raises(HeadloomError, match="at least two variants"):
            compare("mha", progress=progress)
        assert ("reading the call" in capsys.readouterr().err) == shown
    with pytest.raises(HeadloomError, match=r"progress must be true, false, or .* not 3"):
        compare("mha,gqa", progress=3)
