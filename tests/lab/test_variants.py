import pytest

from headloom.core.errors import HeadloomError
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
