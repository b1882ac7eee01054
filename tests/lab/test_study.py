"""Studies as written: strict, resolved, fair, planned at equal budgets; and one that is trained."""

import json

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.plan import timing
from headloom.lab.plan.budget import TOLERANCE
from headloom.lab.plan.plan import make_plan
from headloom.lab.spec.ready import ready_studies
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.study import Study

SMALL = {
    "backbone": {"layers": 1, "width": 32, "heads": 2},
    "tokens": 16,
    "batch_size": 2,
    "steps": 4,
    "threads": 1,
    "validation_bytes": 2000,
    "engine": {"name": "inline"},
}


def study(*variants, **values):
    return Study.from_mapping({"variants": list(variants) or ["mha", "iha:pseudo_heads=2"], **values})


def labels(spec):
    return [(variant.label, variant.against) for variant in spec.variants]


@pytest.mark.parametrize("name", ready_studies())
def test_ready_studies_are_fair_and_matched_at_tiny_size(name, text_file):
    spec = resolve_study(Study.from_yaml(name, size="tiny", settings=[f"data={text_file}"]))
    plan = make_plan(spec)
    assert spec.question.endswith("?") and len(spec.seeds) >= 3 and spec.threads == 1
    for variant in spec.variants:
        for match in plan.matches[variant.label]:
            assert abs(match.relative) <= {"parameters": TOLERANCE}.get(match.match, 0.01)
    costs = plan.costs()
    if (budget := spec.budget("parameters")) is not None:
        for variant in spec.variants:
            target = spec.target(budget, variant)
            if target:
                assert costs[variant.label]["parameters"] == pytest.approx(costs[target]["parameters"], rel=TOLERANCE)
    if spec.budget("flops"):
        total = {label: cost["training_flops_exact"] for label, cost in costs.items()}
        assert all(value == pytest.approx(total[spec.reference], rel=0.01) for value in total.values())


@pytest.mark.parametrize("name", ready_studies())
def test_ready_studies_resolve_at_the_papers_size(name):
    spec = resolve_study(Study.from_yaml(name))
    assert spec.size == "125M" and spec.name == name
    assert {v.shape.hidden_size for v in spec.variants} == {768} and len(spec.seeds) >= 3


def test_the_ready_studies_are_those_of_the_specification():
    assert set(ready_studies()) == {
        "equal_parameters", "equal_time", "equal_flops", "spend_it_elsewhere", "heads_sweep", "kernel_sizes",
        "order_and_aggregation", "iha_pseudo_heads", "context_length", "initial_attention",
    }  # fmt: skip
    sweep = resolve_study(Study.from_yaml("heads_sweep")).variants
    assert [(v.shape.num_heads, v.shape.num_heads * v.shape.head_dim) for v in sweep[:2]] == [(1, 768), (2, 768)]
    assert sweep[-1].shape.num_heads == 96
    contexts = [v.shape.tokens for v in resolve_study(Study.from_yaml("context_length")).variants]
    assert (min(contexts), max(contexts)) == (256, 16384)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"variant": ["mha"]}, ["unknown key 'variant'", "Did you mean 'variants'?"]),
        ({"budgets": [{"match": "time", "knobs": "steps"}]}, ["'knobs' in entry 1 of budgets.", "mean 'knob'?"]),
        ({"engine": {"nam": "ray"}}, ["unknown key 'nam' in engine", "Did you mean 'name'?"]),
        ({"backbone": {"layer": 2}}, ["unknown key 'layer' in backbone", "Did you mean 'layers'?"]),
        ({"variants": ["mha", {"uses": "iha"}]}, ["unknown key 'uses' in entry 2 of variants", "Did you mean 'use'?"]),
        ({"steps": "100"}, ["steps", "valid integer", "'100'"]),
        ({"steps": 10.5}, ["steps", "10.5"]),
        ({"seeds": 0}, ["seeds must be a number of seeds from 1 to 1000, not 0"]),
        ({"seeds": 1}, ["one seed gives no interval", "statistics: false"]),
        ({"seeds": [1, 1]}, ["each given once"]),
        ({"learning_rates": [1e-3, 1e-3]}, ["holds one twice"]),
        ({"learning_rates": [1e-3, 0.0]}, ["study: entry 2 of learning_rates: ", "greater than 0, not 0.0"]),
        ({"learning_rates": ["fast"]}, ["study: entry 1 of learning_rates: ", "'fast'"]),
        ({"variants": ["mha", "ihaa"]}, ["unknown mechanism 'ihaa'. Did you mean 'iha'?"]),
        ({"variants": ["mha"]}, ["at least two variants, not 1"]),
        ({"variants": ["mha", "iha:pseudo_head=2"]}, ["Did you mean 'pseudo_heads'?"]),
        ({"variants": ["mha", "gqa", "gqa"]}, ["the variant 'gqa' is given twice"]),
        ({"variants": ["mha", {"use": "sas", "sweep": {"kernel": [1]}}]}, ["unknown option 'kernel' of sas"]),
        ({"variants": ["mha", {"use": "sas", "sweep": {"kernel_size": []}}]}, ["sweep.kernel_size is empty"]),
        ({"variants": ["mha", {"use": "sas", "against": "gqa"}]}, ["compared with 'gqa', which is no other variant"]),
        ({"reference": "mah"}, ["reference 'mah' is no variant. Did you mean 'mha'?"]),
        ({"options": {"sas": {"kernel_size": 1}}}, ["options.sas sets nothing"]),
        ({"size": "tinny"}, ["unknown size 'tinny'"]),
        ({"backbone": {"heads": 7}}, ["7 heads do not divide the width 128"]),
        ({"sizes": {"small": {"stepz": 3}}}, ["unknown key 'stepz'. Did you mean 'steps'?"]),
        # runs that differ in more than mechanism, knob and axes
        (
            {"variants": ["mha", {"use": "iha", "set": {"layers": 3}}]},
            ["iha layers=3 is set apart in layers", "axes: [layers]"],
        ),
        ({"variants": ["mha", {"use": "mha", "sweep": {"heads": [2]}}]}, ["set apart in heads"]),
        ({"groups": [{"tokens": 64}]}, ["set apart in tokens"]),
        # contradictory budgets
        ({"budgets": [{"match": "cache", "knob": "F"}]}, ["F does not move cache; turn one of layers, heads, width"]),
        ({"budgets": [{"match": "parameters", "knob": "steps"}]}, ["steps does not move parameters"]),
        (
            {"budgets": [{"match": "flops", "knob": "steps"}, {"match": "time", "knob": "steps"}]},
            ["steps is turned for flops and for time"],
        ),
        (
            {"budgets": [{"match": "parameters", "knob": "F"}, {"match": "flops", "knob": "layers"}]},
            ["layers, turned for flops, would undo equal parameters"],
        ),
        (
            {"axes": ["steps"], "variants": ["mha", {"use": "iha", "set": {"steps": 5}}],
             "budgets": [{"match": "time", "knob": "steps"}]},
            ["steps is set to 5, and turned for time"],
        ),
        ({"budgets": [{"match": "time", "knob": "steps", "target": "mah"}]}, ["target 'mah' is no variant", "'mha'"]),
        ({"budgets": [{"match": "speed", "knob": "steps"}]}, ["match in entry 1 of budgets: ", "'time'"]),
    ],
)  # fmt: skip
def test_what_is_refused_before_any_data_is_read(values, parts):
    with pytest.raises(HeadloomError) as caught:
        resolve_study(Study.from_mapping({"variants": ["mha", "iha:pseudo_heads=2"], "data": "nowhere", **values}))
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("values", "part"),
    [
        ({"budgets": [{"match": "parameters", "knob": "layers"}], "variants": ["mha", "sas"]}, "at num_layers="),
        ({"tokens": 10**6}, "too little text"),
        ({"variants": ["mha", "iha:rope_theta=none"]}, "attention.rope_theta: mha 10000.0"),
    ],
)
def test_what_is_refused_before_anything_is_trained(values, part, text_file, tmp_path):
    with pytest.raises(HeadloomError) as caught:
        study(**{"data": str(text_file), **values}).run(tmp_path / "s")
    assert part in str(caught.value)
    assert not (tmp_path / "s").exists()


def test_yaml_is_safe_and_must_be_a_study(tmp_path):
    for text, part in (("[1, 2]", "keys and values"), ("a: [", "is not YAML"), ("x: !!python/object:os.x {}", "YAML")):
        (tmp_path / "s.yaml").write_text(text)
        with pytest.raises(HeadloomError, match=part):
            Study.from_yaml(tmp_path / "s.yaml")
    with pytest.raises(HeadloomError, match=r"neither a file nor a ready study\. Did you mean 'equal_time'"):
        Study.from_yaml("equal_tim")


def test_sizes_settings_and_what_is_written_come_back(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(
        "variants: [mha, gqa]\nsteps: 100\nlearning_rates: [1e-3]\nengine: {workers: 3}\nsizes: {tiny: {steps: 7}}\n"
    )
    assert (Study.from_yaml(path).steps, Study.from_yaml(path, size="small").steps) == (7, 100)
    found = Study.from_yaml(path, settings=["steps=9", "engine.timeout=5.5", "seeds=[4, 5]", "data=a b.txt"])
    assert (found.steps, found.seeds, found.data, found.name) == (9, (4, 5), "a b.txt", "mine")
    assert (found.engine.workers, found.engine.timeout, found.learning_rates) == (3, 5.5, (0.001,))
    (tmp_path / "again.yaml").write_text(found.to_yaml())
    assert resolve_study(Study.from_yaml(tmp_path / "again.yaml")) == resolve_study(found)
    with pytest.raises(HeadloomError, match="must look like key=value"):
        Study.from_yaml(path, settings=["steps"])


def test_labels_references_and_groups():
    spec = resolve_study(
        study(
            "mha",
            {"use": "sas", "sweep": {"kernel_size": [1, 3]}},
            {"use": "gqa", "label": "few"},
            {"use": "iha:pseudo_heads=2", "against": "few"},
            axes=["tokens", "batch_size"],
            groups=[{"tokens": 32, "batch_size": 4}, {"tokens": 64, "batch_size": 2}],
        )
    )
    first = [
        ("mha tokens=32", None),
        ("sas:kernel_size=1 tokens=32", "mha tokens=32"),
        ("sas:kernel_size=3 tokens=32", "mha tokens=32"),
        ("few tokens=32", None),
        ("iha tokens=32", "few tokens=32"),
    ]
    assert labels(spec)[:5] == first and labels(spec)[6] == ("sas:kernel_size=1 tokens=64", "mha tokens=64")
    assert spec.reference == "mha tokens=32"
    assert {(v.shape.tokens, v.shape.batch_size) for v in spec.variants} == {(32, 4), (64, 2)}
    assert [v.shape.tokens_a_step for v in spec.variants][::5] == [4 * 31, 2 * 63]


def test_axes_move_what_follows_from_them():
    wide, deep = resolve_study(
        study("mha", {"use": "mha", "label": "w", "set": {"width": 256}}, axes=["width"])
    ).variants
    assert (deep.shape.hidden_size, deep.shape.head_dim, deep.shape.intermediate_size) == (256, 32, 680)
    assert (wide.shape.hidden_size, wide.shape.head_dim, wide.shape.intermediate_size) == (128, 16, 344)


def test_cache_and_tokens_are_matched_exactly(text_file):
    plan = make_plan(
        resolve_study(
            study(
                "mha",
                {"use": "mha", "label": "wide rows", "set": {"batch_size": 4}},
                {"use": "gqa:num_kv_heads=4", "knob": {"cache": "layers"}},
                axes=["batch_size"],
                budgets=[{"match": "cache", "knob": "layers"}, {"match": "tokens", "knob": "steps"}],
                data=str(text_file),
            )
        )
    )
    costs = plan.costs()
    assert plan.shapes["gqa"].num_layers == 4  # half the key/value heads in twice the layers
    assert costs["gqa"]["cache_bytes"] == costs["mha"]["cache_bytes"] == 2 * 2 * 128 * 128 * 4
    assert plan.shapes["wide rows"].steps == 2 * plan.shapes["mha"].steps
    assert costs["wide rows"]["tokens_trained"] == costs["mha"]["tokens_trained"]


@pytest.fixture(scope="module")
def trained(text_file, tmp_path_factory):
    """Equal parameters and time, two rates on one seed, two seeds, times invented: iha's step takes twice mha's."""
    measured = []

    def step_times(runs, data, tokenizer):
        measured.append(list(runs))
        return {
            label: {"median": 0.02 if "iha" in label else 0.01, "low": 0.01, "high": 0.03, "repeats": 9, "samples": []}
            for label in runs
        }

    made = study(
        budgets=[{"match": "parameters", "knob": "F"}, {"match": "time", "knob": "steps"}],
        seeds=2,
        learning_rates=[0.001, 0.004],
        grid_seeds=1,
        data=str(text_file),
        **SMALL,
    )
    folder = tmp_path_factory.mktemp("study") / "s"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "step_times", step_times)
        found = made.run(folder, report=False)
        again = made.run(folder, report=False)
    return found, again, measured, made


def test_time_is_measured_once_and_gives_steps(trained):
    found, again, measured, _ = trained
    assert measured == [["mha", "iha"]]
    mha, iha = found.results["variants"]
    assert (mha["steps"], iha["steps"]) == (4, 2)
    assert mha["planned_seconds"] == iha["planned_seconds"] == pytest.approx(0.04)
    assert iha["step_ratio"] == 2.0
    manifest = json.loads((found.folder / "study.json").read_text())
    assert manifest["frozen"]["iha"]["steps"] == 2 and manifest["time_matches"]["iha"]["relative"] == pytest.approx(0)
    assert [match["match"] for match in iha["matches"]] == ["parameters", "time"]
    assert again.results == found.results
    config = json.loads((found.folder / "runs" / "iha-lr0.001-seed0" / "config.json").read_text())
    assert config["steps"] == 2  # the schedule is stretched to them
    assert "at equal parameters (within 0.5 %) and equal time (within 1.0 %)" in found.headlines[0]


def test_the_best_rate_is_chosen_on_a_text_that_is_not_reported(trained):
    found = trained[0]
    manifest = json.loads((found.folder / "study.json").read_text())
    assert manifest["data"]["selection_tokens"] > 100
    for variant in found.results["variants"]:
        scores = {p["learning_rate"]: p["selection_bits_per_byte"]["mean"] for p in variant["grid"]}
        assert variant["learning_rate"] == min(scores, key=scores.get)
        assert variant["grid_edge"] and list(scores) == [0.001, 0.004]
        assert set(variant["bits_per_byte"]["values"]) == {"0", "1"}
        mine = [run for run in found.results["runs"] if run["variant"] == variant["label"]]
        assert [(run["seed"], run["chosen"]) for run in mine].count((1, True)) == 1 and len(mine) == 3
        for run in mine:
            assert run["selection_bits_per_byte"] != run["bits_per_byte"]
    assert sum("learning rate" in warning for warning in found.results["warnings"]) == 2


def test_records_of_a_study(trained):
    found, _, _, made = trained
    assert found.results["status"] == "complete" and found.results["summary"].startswith("iha is ")
    variant = found.results["variants"][1]
    per_token = variant["training_flops_per_token_exact"]
    assert variant["training_flops_exact"] == per_token * 2 * 2 * 15 < variant["training_flops_full"]
    lines = (found.folder / "runs" / "iha-lr0.001-seed0" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["flops"] == pytest.approx(per_token * 2 * 15)
    assert [run["mixes"] for run in found.results["runs"]] == ["iha" in r["variant"] for r in found.results["runs"]]
    assert len({run["weights"] for run in found.results["runs"]}) == len(found.results["runs"]) == 6
    assert resolve_study(Study.from_yaml(found.folder / "study.yaml")) == resolve_study(made)


def test_a_study_in_python_is_the_one_in_yaml():
    import headloom as hl

    assert hl.Study is Study
    assert hl.Study(variants=("mha", "gqa"), seeds=2) == study("mha", "gqa", seeds=2)


def test_a_full_disk_is_said_and_nothing_is_lost(trained, monkeypatch):
    import errno

    from headloom.lab.run import runner

    found, _, _, made = trained
    before = {path: path.read_bytes() for path in found.folder.rglob("*") if path.is_file()}

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(runner, "write_results", full)
    with pytest.raises(HeadloomError, match=r"the disk that holds .* is full: what was finished is kept"):
        made.run(found.folder, report=False)
    assert {path: path.read_bytes() for path in found.folder.rglob("*") if path.is_file()} == before


def test_checkpoints_that_a_kill_left_beside_a_result_are_removed(trained):
    found, _, _, made = trained
    left = found.folder / "runs" / "mha-lr0.001-seed0" / "checkpoints" / "step-3"
    left.mkdir(parents=True)
    made.run(found.folder, report=False)
    assert not left.parent.exists()


def test_whether_a_run_is_finished_is_only_asked(trained, monkeypatch):
    from headloom.lab.run.runner import Runner

    class Stop(Exception):
        pass

    def ask(runner, engine):
        assert runner._is_finished("mha", 0, 0.001)
        raise Stop

    found, _, _, made = trained
    left = found.folder / "runs" / "mha-lr0.001-seed0" / "checkpoints"
    left.mkdir()
    monkeypatch.setattr(Runner, "_runs", ask)
    with pytest.raises(Stop):
        made.run(found.folder, report=False)
    left.rmdir()  # it is there


def test_a_mapping_goes_from_yaml_to_the_module_as_it_is(text_file, tmp_path):
    """For all variants of a name, for one variant, and swept: the module's own config holds the mapping."""
    from headloom.lab.plan.layers import meta_model
    from headloom.lab.spec.resolved import StudySpec

    scaling = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0] * 8, "long_factor": [1.0, 2.0] * 4}
    path = tmp_path / "scaled.yaml"
    path.write_text(
        f"""
        data: {text_file}
        options: {{mha: {{rope_scaling: {json.dumps(scaling)}}}}}
        variants:
          - mha
          - {{use: "iha:pseudo_heads=2", options: {{rope_scaling: {json.dumps(scaling)}, order: token}}}}
          - {{use: iha, sweep: {{rope_scaling: [{json.dumps(scaling)}], pseudo_heads: [3]}}}}
        """
    )
    written = Study.from_yaml(path, settings=[f"{key}={json.dumps(value)}" for key, value in SMALL.items()])
    spec = resolve_study(written)
    assert make_plan(spec).configs["mha"]["attention"]["rope_scaling"] == scaling
    for variant in spec.variants:
        assert variant.options["rope_scaling"] == scaling
        attention = meta_model(spec, variant, variant.shape, 300).model.layers[0].self_attn
        assert attention.config.rope_scaling == scaling
    assert spec.variants[1].options["order"] == "token" and spec.variants[2].options["pseudo_heads"] == 3
    assert StudySpec.model_validate_json(spec.model_dump_json()) == spec
    (tmp_path / "again.yaml").write_text(written.to_yaml())
    assert resolve_study(Study.from_yaml(tmp_path / "again.yaml")) == spec


def test_an_option_said_twice_for_one_variant_is_refused():
    with pytest.raises(HeadloomError, match="option 'pseudo_heads' of iha is given twice"):
        resolve_study(study("mha", {"use": "iha:pseudo_heads=2", "options": {"pseudo_heads": 4}}))
