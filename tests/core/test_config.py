"""Frozen configs: types checked when built, unknown names refused, strict JSON, text from the command line."""

from __future__ import annotations

import json

import pytest

from headloom.core.config import parse_option
from headloom.core.errors import HeadloomError, near
from headloom.core.registry import Registry
from headloom.mechanism import make_config, mechanisms
from headloom.mechanism.iha import IHAConfig


def test_parse_option_reads_the_annotation():
    assert parse_option(IHAConfig, "pseudo_heads", "2") == 2
    assert parse_option(IHAConfig, "dropout", "0.25") == 0.25
    assert parse_option(IHAConfig, "rope_theta", "none") is None
    assert parse_option(IHAConfig, "causal", "False") is False
    assert parse_option(IHAConfig, "order", "token") == "token"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("pseudo_head", "2", "unknown option 'pseudo_head'. Did you mean 'pseudo_heads'?"),
        ("pseudo_heads", "two", "pseudo_heads must be an int or None, not 'two'"),
        ("pseudo_heads", "2.5", "an int or None, not '2.5'"),
        ("order", "tokens", "order must be 'virtual' or 'token', not 'tokens'. Did you mean 'token'?"),
        ("causal", "yes", "causal must be true or false, not 'yes'"),
    ],
)
def test_parse_option_says_what_is_allowed(name: str, text: str, message: str):
    with pytest.raises(HeadloomError) as error:
        parse_option(IHAConfig, name, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_heads": 4.0}, "num_heads must be an int, not 4.0"),
        ({"causal": 1}, "causal must be true or false, not 1"),
        ({"dropout": True}, "dropout must be a number, not True"),
        ({"order": "Virtual"}, "order must be 'virtual' or 'token', not 'Virtual'"),
        ({"hedd_dim": 4}, "unknown option 'hedd_dim' of iha. Did you mean 'head_dim'?"),
    ],
)
def test_wrong_types_are_refused(options: dict, message: str):
    with pytest.raises(HeadloomError) as error:
        make_config("iha", **{"hidden_size": 8, "num_heads": 4, **options})
    assert message in str(error.value)


def test_missing_sizes_are_named():
    with pytest.raises(HeadloomError, match="mha needs hidden_size and num_heads"):
        make_config("mha")


def test_unknown_mechanism_suggests_the_near_one():
    with pytest.raises(HeadloomError, match=r"unknown mechanism 'ihaa'. Did you mean 'iha'"):
        make_config("ihaa", hidden_size=8, num_heads=4)


@pytest.mark.parametrize("name", list(mechanisms()))
def test_configs_survive_json(name: str):
    config = mechanisms()[name].config_cls.tiny()
    assert type(config).from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(HeadloomError, match=r"unknown option 'windw'. Did you mean 'window'"):
        type(config).from_dict({**config.to_dict(), "windw": 3})
    assert config.replace(norm_eps=0.5).norm_eps == 0.5 and config.norm_eps == 1e-6
    with pytest.raises(AttributeError):
        config.window = 3


def test_ints_serve_as_numbers():
    config = make_config("mha", hidden_size=8, num_heads=4, rope_theta=500)
    assert config.rope_theta == 500.0 and type(config.rope_theta) is float


def test_registry_refuses_duplicates_and_suggests():
    registry: Registry[int] = Registry("colour")
    registry.add("red", 1)
    registry.add("red", 1)
    with pytest.raises(TypeError, match="colour 'red' is registered twice"):
        registry.add("red", 2)
    with pytest.raises(HeadloomError, match=r"unknown colour 'rad'. Did you mean 'red'"):
        registry["rad"]
    assert near("zzz", ["red"]) == ""
