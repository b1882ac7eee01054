"""Options as people are told them: the meaning beside the field, the values, and measured costs."""

import pytest

from headloom.contract.bases.base import options_of
from headloom.core.config import fields_of, meanings, own_first
from headloom.costs.options import options
from headloom.mechanism import AttentionConfig, mechanisms
from headloom.mechanism.schedules import option_classes, schedules


@pytest.mark.parametrize("name", [*mechanisms(), *schedules()])
def test_every_option_says_what_it_means(name):
    rows = options(name, costs=False)
    assert all(row.meaning for row in rows)
    owned = [row.own for row in rows]
    assert owned == sorted(owned, reverse=True)
    of_bases = {*options_of(("mla", "tpa"))} if name not in ("mfa", "mfa_kr") else set()
    own = {field for cls in option_classes(name) for field in own_first(cls)} - set(fields_of(AttentionConfig))
    assert {row.name for row in rows if row.own} == own - of_bases
    assert {row.name for row in rows if row.bases} == own & of_bases


def test_a_field_that_a_mechanism_gives_another_default_keeps_its_meaning():
    simplicial, linear = (mechanisms()[name].config_cls for name in ("simplicial", "linear"))
    assert (
        meanings(simplicial)["rope_theta"] == meanings(AttentionConfig)["rope_theta"] == meanings(linear)["rope_theta"]
    )
    assert "None: 2 head_dim" in meanings(mechanisms()["mfa"].config_cls)["latent_dim"]


def test_costs_are_the_closed_forms():
    """D = 768, H = 12, K = 64, P = 2 in comparisons."""
    rows = {row.name: row for row in options("iha", {"pseudo_heads": 2})}
    D, H = 768, 12
    at = {P: 4 * D * D + 4 * H * H * P for P in (2, 4)}
    assert rows["pseudo_heads"].usual == 2 and rows["pseudo_heads"].default is None
    four = rows["pseudo_heads"].costs["4"]
    assert four["parameters"] == pytest.approx(at[4] / at[2]) and four["cache"] == 1.0
    assert four["scores"] == pytest.approx(4, rel=1e-3)  # P^2, and its corner of a token's own pseudo-keys
    assert rows["interaction"].costs["paired"]["scores"] == pytest.approx(0.5, rel=1e-3)
    assert rows["cache"].costs["expanded"]["cache"] == 2.0
    assert rows["num_kv_heads"].costs["6"]["cache"] == 0.5
    assert rows["window"].costs["128"]["cache"] == 128 / 2048
    assert rows["dropout"].costs == {} and rows["rope_scaling"].costs == {}
    assert "absorb" not in rows and "channels" not in rows


def test_a_schedules_costs_are_averages_over_its_layers():
    rows = {row.name: row for row in options("hybrid")}
    # ten layers, eight local with W = T / (2 P^2): 2048 / 8 tokens at P = 2, 2048 / 32 at P = 4
    assert rows["pseudo_heads"].costs["4"]["cache"] == pytest.approx((8 * 64 + 2 * 2048) / (8 * 256 + 2 * 2048))
    assert list(rows["local"].costs) == ["1"]


def test_options_without_a_meaning_here_are_left_out():
    assert not {"rope_theta", "rotary_dim", "rope_scaling", "latent_dim"} & {
        row.name for row in options("linear", costs=False)
    }
