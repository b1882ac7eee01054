import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.plan.fairness import differences, refuse_other_differences

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


def test_what_means_nothing_to_a_mechanism_makes_no_difference():
    """bilinear has no rotary: its rope_theta None is not compared, but the others' are, with each other."""
    configs = {"a": {"rope": 1.0, "seed": 0}, "b": {"rope": None, "seed": 0}, "c": {"rope": 1.0, "seed": 0}}
    without = {"b": {"rope"}}
    with pytest.raises(HeadloomError, match=r"rope: a 1.0, b None, c 1.0"):
        refuse_other_differences(configs, ())
    refuse_other_differences(configs, (), without)
    with pytest.raises(HeadloomError, match=r"rope: a 1.0, c 2.0"):
        refuse_other_differences({**configs, "c": {"rope": 2.0, "seed": 0}}, (), without)
    with pytest.raises(HeadloomError, match="seed"):
        refuse_other_differences({**configs, "b": {"rope": None, "seed": 1}}, (), without)


def test_a_mechanism_without_rotary_compares_with_those_that_have_it():
    from headloom.lab.compare import comparison_study
    from headloom.lab.plan.layers import allowed_differences, meaningless, resolved_attention
    from headloom.lab.spec.resolve import resolve_study

    def check(variants):
        given = {"seeds": 1, "data": "stdlib", "tokenizer": "bytes", "threads": 1}
        spec = resolve_study(comparison_study(variants, "tiny", **given), kind="compare")
        configs = {v.label: resolved_attention(spec, v) for v in spec.variants}
        refuse_other_differences(configs, allowed_differences(spec), meaningless(spec))
        return {label: config["attention"]["rope_theta"] for label, config in configs.items()}

    assert check("mha,mfa,bilinear,linear") == {"mha": 10000.0, "mfa": 10000.0, "bilinear": None, "linear": None}
    with pytest.raises(HeadloomError, match=r"attention.rope_theta: mha 10000.0, mha:rope_theta=5.0 5.0;"):
        check("mha,mha:rope_theta=5,linear")
