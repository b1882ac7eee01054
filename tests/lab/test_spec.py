import json
import shlex

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.compare import compare_command, comparison_study
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.resolved import StudySpec, identity
from headloom.lab.spec.sizes import SIZES, gated_width, get_size
from headloom.lab.spec.variants import parse_variants

TWO = ["mha", ("iha", {"pseudo_heads": 2})]


def spec(variants=TWO, size="tiny", **changes):
    given = {"seeds": 3, "data": "stdlib", "tokenizer": "bytes", "threads": 2, **changes}
    return resolve_study(comparison_study(variants, size, **given), kind="compare")


def test_nothing_is_left_open():
    found = spec(steps=7)
    assert (found.steps, found.seeds, found.reference) == (7, (0, 1, 2), "mha")
    assert [variant.shape.tokens for variant in found.variants] == [get_size("tiny").tokens] * 2
    assert found.learning_rates == (get_size("tiny").learning_rate,)
    assert [(variant.label, variant.against) for variant in found.variants] == [("mha", None), ("iha", "mha")]


def test_json_round_trip_is_strict():
    found = spec()
    text = found.model_dump_json()
    assert StudySpec.model_validate_json(text) == found
    with pytest.raises(ValueError, match="stepss"):
        StudySpec.model_validate_json(json.dumps({**json.loads(text), "stepss": 1}))
    with pytest.raises(ValueError, match="threads"):
        StudySpec.model_validate_json(json.dumps({**json.loads(text), "threads": "7"}))


def test_the_reference_is_the_first_where_the_usual_one_is_absent():
    assert spec("sas,iha").reference == "sas"
    assert spec("sas,mha").reference == "mha"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"steps": 0}, "steps: input should be greater than or equal to 1, not 0"),
        ({"tokens": 1}, "tokens: input should be greater than or equal to 2, not 1"),
        ({"batch_size": -3}, "batch_size"),
        ({"learning_rate": 0.0}, "learning_rate"),
        ({"learning_rate": float("nan")}, "learning_rate"),
        ({"learning_rate": float("inf")}, "learning_rate"),
        ({"threads": 0}, "threads"),
        ({"seeds": 0}, "seeds must be a number of seeds from 1 to 1000, not 0"),
        ({"data": ""}, "data"),
    ],
)
def test_values_out_of_bounds(changes, part):
    with pytest.raises(HeadloomError) as caught:
        spec(**changes)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_command_makes_the_same_specification():
    command = compare_command(spec(steps=7, data="my texts/a.txt", learning_rate=3e-4))
    assert command.startswith("headloom compare --variants mha,iha:pseudo_heads=2 --size tiny --steps 7 --seeds 3")
    assert "--data 'my texts/a.txt'" in command
    assert "--learning-rate 0.0003 " in command


def test_identity_depends_on_every_value_and_not_on_order():
    assert identity({"a": 1, "b": 2}) == identity({"b": 2, "a": 1})
    assert identity(spec().model_dump(mode="json")) != identity(spec(seeds=4).model_dump(mode="json"))


def test_the_papers_sizes():
    assert get_size("10.6B").nominal_parameters == 10_581_442_560
    assert get_size("2.4B").nominal_parameters == 2_373_058_560
    shapes = {name: (size.num_layers, size.hidden_size, size.num_heads) for name, size in SIZES.items()}
    assert shapes["125M"] == (12, 768, 12)
    assert shapes["350M"] == (24, 1024, 16)
    assert shapes["1.3B"] == (24, 2048, 32)
    assert shapes["2.7B"] == (32, 2560, 32)
    assert shapes["6.7B"] == (32, 4096, 32)
    assert get_size("2.4B").head_dim == 128
    # a gated layer of our width has the ungated layer's parameters: 3 D F against 8 D^2
    for size in SIZES.values():
        assert 3 * size.hidden_size * size.intermediate_size == pytest.approx(8 * size.hidden_size**2, rel=0.011)
    assert gated_width(768) == 2048


def test_an_unknown_size_names_the_near_one():
    with pytest.raises(HeadloomError, match=r"unknown size 'tny'\. Did you mean 'tiny'\?"):
        get_size("tny")


def test_the_command_says_a_mapping_so_that_it_is_read_back():
    scaling = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 1e-05, "note": "a, b: {c}"}
    made = spec([("mha", {"rope_scaling": scaling}), ("iha", {"rope_scaling": scaling})])
    words = shlex.split(compare_command(made))
    found = parse_variants(words[words.index("--variants") + 1])
    assert [variant.options["rope_scaling"] for variant in found] == [scaling] * 2
