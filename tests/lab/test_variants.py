import re

import pytest
from pydantic import ValidationError

from headloom.core.errors import HeadloomError
from headloom.lab.compare import comparison_study
from headloom.lab.plan.layers import resolved_attention as resolved_attention
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.resolved import Variant
from headloom.lab.spec.study import WrittenStudy
from headloom.lab.spec.variants import parse_variants, refuse_duplicates


def texts(variants):
    return [variant.text for variant in variants]


def test_the_default_four():
    found = parse_variants(None)
    assert texts(found) == ["mha", "gqa", "iha:pseudo_heads=2", "sas"]
    assert [variant.label for variant in found] == ["mha", "gqa", "iha", "sas"]
    assert found[2].defaulted == ("pseudo_heads",)


def test_options_are_typed_and_labels_tell_apart():
    found = parse_variants("mha,iha:pseudo_heads=2:order=token,iha:pseudo_heads=4,sas:base=mqa")
    assert found[1].options == {"pseudo_heads": 2, "order": "token"}
    assert [variant.label for variant in found] == [
        "mha",
        "iha:order=token:pseudo_heads=2",
        "iha:pseudo_heads=4",
        "sas",
    ]
    assert not found[1].defaulted


def test_set_reaches_every_variant_of_the_name_and_wins():
    found = parse_variants("mha,iha:order=token,iha", ["iha.pseudo_heads=4", "iha.collapse=head"])
    assert all(variant.options["pseudo_heads"] == 4 for variant in found[1:])
    assert [variant.options.get("order") for variant in found] == [None, "token", None]
    assert parse_variants("mha,iha:pseudo_heads=8", ["iha.pseudo_heads=4"])[1].options == {"pseudo_heads": 4}
    assert parse_variants(None, ["iha.pseudo_heads=4"])[2].options == {"pseudo_heads": 4}
    assert not parse_variants(None, ["iha.pseudo_heads=4"])[2].defaulted


def test_a_list_and_a_text_are_the_same():
    assert parse_variants(["mha", "sas:kernel_size=1"]) == parse_variants(" mha , sas:kernel_size=1 ")


@pytest.mark.parametrize(
    ("variants", "settings", "parts"),
    [
        ("mha,ihaa", (), ["unknown mechanism 'ihaa'", "Did you mean 'iha'?", "gqa"]),
        ("mha,iha:pseudo_head=2", (), ["unknown option 'pseudo_head' of iha", "Did you mean 'pseudo_heads'?"]),
        ("mha,iha:order=tokens", (), ["iha", "order", "'token'", "tokens"]),
        ("mha,iha:pseudo_heads=two", (), ["iha", "pseudo_heads must be", "'two'"]),
        ("mha,iha:pseudo_heads", (), ["must look like name=value", "'pseudo_heads'"]),
        ("mha,iha:pseudo_heads=2:pseudo_heads=4", (), ["given twice"]),
        ("mha,mha", (), ["'mha' is given twice"]),
        ("mha,iha:pseudo_heads=2,iha", (), ["'iha:pseudo_heads=2' is given twice"]),
        ("mha", (), ["at least two variants, not 1"]),
        ("", (), ["at least two variants, not 0"]),
        ("mha,:x=1", (), ["must look like name:option=value", "':x=1'"]),
        ("mha,sas:hidden_size=64", (), ["sas sets hidden_size", "--size"]),
        ("mha,sas", ("iha.pseudo_heads=2",), ["--set iha.pseudo_heads sets nothing", "mha, sas"]),
        ("mha,iha", ("pseudo_heads=2",), ["--set must look like name.option=value", "pseudo_heads=2"]),
        ("mha,iha", ("iha.pseudo_heads",), ["--set must look like name=value"]),
        ("mha,iha", ("iha.phse=token",), ["unknown option 'phse' of iha", "'phase'"]),
    ],
)
def test_wrong_calls(variants, settings, parts):
    with pytest.raises(HeadloomError) as caught:
        parse_variants(variants, settings)
    message = str(caught.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_the_same_variant_spelled_differently_is_refused():
    same = {"order": "virtual", "pseudo_heads": 2}
    with pytest.raises(HeadloomError, match="'iha' and 'iha:order=virtual' are the same"):
        refuse_duplicates({"mha": ("mha", {}), "iha": ("iha", same), "iha:order=virtual": ("iha", dict(same))})
    refuse_duplicates({"a": ("mha", same), "b": ("iha", same)})


SCALING = {"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0, 1.5], "long_factor": [2, 1e-05]}


@pytest.mark.parametrize(
    ("variants", "settings"),
    [
        (
            "mha,iha:rope_scaling={rope_type: longrope, factor: 2.0, short_factor: [1.0, 1.5], long_factor: [2, 1e-5]}",
            (),
        ),
        (
            "mha,iha",
            ["iha.rope_scaling={rope_type: longrope, factor: 2.0, short_factor: [1.0, 1.5], long_factor: [2, 1e-5]}"],
        ),
        (["mha", ("iha", {"rope_scaling": SCALING})], ()),
        (["mha", "iha"], {"iha": {"rope_scaling": SCALING}}),
    ],
)
def test_a_mapping_keeps_its_types_on_every_way_in_and_round_trips(variants, settings):
    found = parse_variants(variants, settings)[1]
    assert found.options == {"pseudo_heads": 2, "rope_scaling": SCALING}
    assert type(found.options["rope_scaling"]["long_factor"][0]) is int
    again = parse_variants(f"mha,{found.text},gqa")
    assert len(again) == 3 and again[1].options == found.options


@pytest.mark.parametrize(
    ("variants", "settings", "parts"),
    [
        ("mha,iha:rope_scaling={rope_type: linear", (), ["do not close"]),
        ("mha,iha:rope_scaling={a: b: c}", (), ["rope_scaling", "not YAML"]),
        ("mha,iha:rope_scaling=linear", (), ["rope_scaling must be a mapping or None, not 'linear'"]),
        ("mha,iha:pseudo_heads=[2]", (), ["pseudo_heads must be an int or None, not [2]"]),
        (["mha", ("iha", {"pseudo_heads": 2.5})], (), ["pseudo_heads must be an int or None, not 2.5"]),
        (["mha", 3], (), ["a variant must be a text like iha:pseudo_heads=2, or (name, options), not 3"]),
        (5, (), ["variants must be a text or a list of texts, not 5"]),
        ("mha,iha", "iha.pseudo_heads=2", ["settings must be a list of texts"]),
        # its own options stand before those that all mechanisms have
        ("mha,iha:phse=token", (), ["Allowed: pseudo_heads, interaction, order"]),
    ],
)
def test_wrong_values_by_type(variants, settings, parts):
    test_wrong_calls(variants, settings, parts)


LINEAR = {"rope_type": "linear", "factor": 2}
PATTERN = [["iha", {"pseudo_heads": 2, "rope_scaling": LINEAR}], "mha"]
YAML = """
variants:
  - mha
  - {use: "iha:pseudo_heads=2", options: {rope_scaling: {rope_type: linear, factor: 2}}}
  - [pattern, {layers: [[iha, {pseudo_heads: 2, rope_scaling: {rope_type: linear, factor: 2}}], mha]}]
"""
TEXT = "mha,iha:pseudo_heads=2:rope_scaling={rope_type: linear, factor: 2}"


def from_yaml(path, kind):
    path.write_text(YAML)
    return resolve_study(WrittenStudy.from_yaml(path, settings=["seeds=2"]), kind=kind).variants


def from_text(path, kind):
    """A list or mapping on the command line is YAML too."""
    pattern = "pattern:layers=[[iha, {pseudo_heads: 2, rope_scaling: {rope_type: linear, factor: 2}}], mha]"
    return resolve_study(comparison_study(f"{TEXT},{pattern}", seeds=2), kind=kind).variants


def from_python(path, kind):
    given = ["mha", ("iha", {"pseudo_heads": 2, "rope_scaling": LINEAR}), ("pattern", {"layers": PATTERN})]
    return resolve_study(WrittenStudy(variants=given, seeds=2), kind=kind).variants


def from_settings(path, kind):
    settings = {"pattern": {"layers": PATTERN}, "iha": {"rope_scaling": LINEAR}}
    study = comparison_study(["mha", "iha:pseudo_heads=2", "pattern"], settings=settings, seeds=2)
    return resolve_study(study, kind=kind).variants


@pytest.mark.parametrize("ways_in", [from_yaml, from_text, from_python, from_settings])
def test_mappings_and_lists_of_layers_are_the_same_variant_on_every_way_in(ways_in, tmp_path):
    _, iha, pattern = ways_in(tmp_path / "a.yaml", "compare")
    assert iha == Variant(
        label="iha",
        mechanism="iha",
        options={"pseudo_heads": 2, "rope_scaling": LINEAR},
        against="mha",
        shape=iha.shape,
    )
    assert pattern.options == {"layers": PATTERN}
    assert iha.shape is not None
    deeper = iha.shape.model_copy(update={"num_layers": 3})
    assert pattern.layers(deeper) == [("iha", PATTERN[0][1]), ("mha", {}), ("iha", PATTERN[0][1])]
    assert parse_variants(["mha", pattern.text])[1].options == pattern.options
    with pytest.raises(ValidationError, match="frozen"):
        iha.label = "other"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("[]", "pattern: an empty pattern: give at least one mechanism"),
        ("[iha, hybrid]", "'hybrid' is a schedule of many layers"),
        ("[[iha, {pseudo_head: 2}]]", "unknown option 'pseudo_head' of iha. Did you mean 'pseudo_heads'?"),
        ("[3]", "must be a mechanism's name or"),
        ("iha", "layers must be a list, not 'iha'"),
        ("[mha, mha, iha]", "a pattern of 3 layers does not fit a model of 2"),
        ("[[mha, {head_dim: 8}]]", "mha sets head_dim, which all variants share"),
    ],
)
def test_patterns_that_cannot_be(layers, message):
    with pytest.raises(HeadloomError, match=re.escape(message)):
        spec = resolve_study(comparison_study(f"mha,pattern:layers={layers}", seeds=2), kind="compare")
        resolved_attention(spec, spec.variants[1])


def test_a_setting_given_twice_is_refused():
    with pytest.raises(HeadloomError, match=r"--set iha\.order is given twice"):
        comparison_study("mha,iha", settings=["iha.order=token", "iha.order=virtual"], seeds=2)
