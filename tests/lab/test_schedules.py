"""Schedules of layers in a comparison: options, what is resolved, what may differ."""

import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.compare import compare_command, comparison_study
from headloom.lab.plan.fairness import refuse_other_differences
from headloom.lab.plan.layers import (
    allowed_differences,
    count_parameters,
    meaningless,
    run_config,
)
from headloom.lab.plan.layers import (
    resolved_attention as resolved_attention,
)
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.sizes import get_size
from headloom.lab.spec.variants import parse_variants


def spec(variants, size="small", **changes):
    given = {"seeds": 1, "data": "stdlib", "tokenizer": "bytes", "threads": 1, **changes}
    return resolve_study(comparison_study(variants, size, **given), kind="compare")


def test_options_are_typed_and_the_text_comes_back():
    found = parse_variants("mha,hybrid:pseudo_heads=4:order=token,hybrid:window=none", ["hybrid.local=1"])
    assert found[1].options == {"pseudo_heads": 4, "order": "token", "local": 1}
    assert found[2].options == {"window": None, "local": 1}
    assert parse_variants(f"mha,{found[1].text}")[1].options == found[1].options
    assert "hybrid:local=1:order=token:pseudo_heads=4" in compare_command(
        spec("mha,hybrid:local=1:order=token:pseudo_heads=4")
    )


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("hybrd", ["unknown mechanism 'hybrd'", "Did you mean 'hybrid'?"]),
        ("hybrid:locl=2", ["unknown option 'locl' of hybrid", "Did you mean 'local'?", "order"]),
        ("hybrid:local=two", ["hybrid: local must be an int or None, not 'two'"]),
        ("hybrid:order=tokens", ["hybrid: order must be 'virtual' or 'token'"]),
        ("hybrid:hidden_size=8", ["hybrid sets hidden_size"]),
    ],
)
def test_wrong_options(text, parts):
    with pytest.raises(HeadloomError) as caught:
        parse_variants(f"mha,{text}")
    assert all(part in str(caught.value) for part in parts)


def test_what_is_resolved():
    """small: 6 layers, context 512: W = 512 / 8 = 64; four local layers, a global one, a local one."""
    found = spec("mha,hybrid:num_kv_heads=8:qk_norm=head")
    hybrid = found.variant("hybrid")
    config = resolved_attention(found, hybrid)
    assert set(config["layers"]) == {"0-3,5", "4"}
    local = config["layers"]["0-3,5"]
    assert (local["mechanism"], local["window"], local["pseudo_heads"]) == ("iha", 64, 2)
    assert config["layers"]["4"] == {"mechanism": "mha", "base": "mha"}
    assert config["attention"]["window"] is None and config["attention"]["qk_norm"] == "head"
    run = run_config(found, hybrid, hybrid.shape, 0)
    assert [layer.mechanism for layer in run.specs] == ["iha"] * 4 + ["mha", "iha"]
    assert run.specs[0].options == {"num_kv_heads": 8, "qk_norm": "head", "pseudo_heads": 2, "window": 64}
    assert len(run_config(found, found.variant("mha"), hybrid.shape, 0).specs) == 1
    mha = found.variant("mha")
    extra = count_parameters(found, hybrid, hybrid.shape, 258) - count_parameters(found, mha, mha.shape, 258)
    assert extra == 5 * 4 * 8 * 8 * 2 + 6 * 2 * get_size("small").head_dim


def test_only_the_schedule_may_differ():
    def check(variants):
        found = spec(variants)
        configs = {v.label: {"mechanism": v.mechanism, **resolved_attention(found, v)} for v in found.variants}
        refuse_other_differences(configs, allowed_differences(found), meaningless(found))

    check("mha,hybrid")
    check("mha,hybrid:window=5")
    check("gqa:num_kv_heads=2,hybrid:local=2")
    check("mha:dropout=0.1,hybrid:dropout=0.1")
    with pytest.raises(HeadloomError, match=r"attention\.dropout: mha 0\.0, hybrid 0\.1"):
        check("mha,hybrid:dropout=0.1")
    with pytest.raises(HeadloomError, match=r"attention\.window: mha 16, hybrid None"):
        check("mha:window=16,hybrid")


def test_a_schedule_that_does_not_fit_names_the_variant():
    found = spec("mha,hybrid:pseudo_heads=16", tokens=64)
    with pytest.raises(HeadloomError, match=r"^hybrid: hybrid's window N/\(2 P\^2\) is below 1"):
        resolved_attention(found, found.variant("hybrid"))


def test_what_every_place_of_a_pattern_says_is_common_to_its_layers():
    layers = "[[iha, {pseudo_heads: 2, softcap: 30}], [mha, {softcap: 30}]]"
    found = spec(f"mha:softcap=30,pattern:layers={layers}")
    config = resolved_attention(found, found.variant("pattern"))
    assert config["attention"]["softcap"] == 30.0 and set(config["layers"]) == {"0,2,4", "1,3,5"}
    assert "softcap" not in config["layers"]["1,3,5"]
    configs = {v.label: {"mechanism": v.mechanism, **resolved_attention(found, v)} for v in found.variants}
    refuse_other_differences(configs, allowed_differences(found), meaningless(found))
