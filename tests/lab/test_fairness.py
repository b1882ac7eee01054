import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.fairness import differences, refuse_other_differences

MHA = {"mechanism": "mha", "attention": {"rope_theta": 10000.0, "base": "mha"}, "intermediate_size": 344, "lr": 0.1}
IHA = {"mechanism": "iha", "attention": {"rope_theta": 10000.0, "base": "gqa", "order": "token"},
       "intermediate_size": 300, "lr": 0.1}  # fmt: skip
ALLOWED = {"mechanism", "intermediate_size", "attention.base", "attention.order"}


def test_differences_by_key():
    assert differences({"mha": MHA, "iha": IHA}) == {
        "mechanism": {"mha": "mha", "iha": "iha"},
        "attention.base": {"mha": "mha", "iha": "gqa"},
        "intermediate_size": {"mha": 344, "iha": 300},
        "attention.order": {"mha": "(absent)", "iha": "token"},
    }


def test_fair_runs_pass():
    refuse_other_differences({"mha": MHA, "iha": IHA}, ALLOWED)


def test_rotary_dropped_in_one_is_refused_with_the_difference_printed():
    unfair = {**IHA, "attention": {**IHA["attention"], "rope_theta": None}}
    with pytest.raises(HeadloomError) as caught:
        refuse_other_differences({"mha": MHA, "iha": unfair}, ALLOWED)
    assert "attention.rope_theta: mha 10000.0, iha None" in str(caught.value)
    assert "order" not in str(caught.value)


def test_prefixes_and_types():
    refuse_other_differences({"a": {"o": {"x": 1}}, "b": {"o": {"y": 2}}}, {"o."})
    with pytest.raises(HeadloomError):
        refuse_other_differences({"a": {"o": {"x": 1}}, "b": {"o": {"y": 2}}}, {"o"})
    assert differences({"a": {"x": True}, "b": {"x": 1}}) == {"x": {"a": True, "b": 1}}
