"""Scaled rotary embeddings in every mechanism, with transformers' own frequencies, against the loop oracles."""

import itertools

import pytest
import torch
from oracles import ORACLES
from oracles.common import settings
from oracles.compare import assert_close, assert_matches, draw, randomise
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import headloom as hl

SIZES = {"hidden_size": 11, "num_heads": 3, "head_dim": 6, "rope_theta": 500.0}
BUILDS = {
    "mha": ("mha", {}),
    "iha-virtual": ("iha", {"pseudo_heads": 2, "phase": "virtual"}),
    "iha-token": ("iha", {"pseudo_heads": 2, "phase": "token", "order": "token"}),
    "iha-expanded": ("iha", {"pseudo_heads": 2, "phase": "virtual", "cache": "expanded"}),
    "iha-paired": ("iha", {"pseudo_heads": 2, "phase": "token", "interaction": "paired", "collapse": "mean"}),
    "sas": ("sas", {"simulated_heads": 6, "simulated_width": 8, "kernel_size": 3}),
    "sas-base": ("sas", {"simulated_heads": 6, "simulated_width": 8, "kernel_size": 1, "cache": "base"}),
    "mla": ("mla", {"rotary_dim": 6, "plain_dim": 5}),
    "tpa": ("tpa", {}),
    "iha-mla": ("iha", {"base": "mla", "rotary_dim": 6, "pseudo_heads": 2, "phase": "virtual"}),
    "iha-tpa": ("iha", {"base": "tpa", "pseudo_heads": 2, "phase": "virtual", "cache": "expanded"}),
    "sas-mla": ("sas", {"base": "mla", "rotary_dim": 6, "simulated_heads": 6, "kernel_size": 1, "cache": "base"}),
}
SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0, "max_position_embeddings": 4},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.5, 2.0],
        "long_factor": [2.0, 3.0, 5.0],
        "original_max_position_embeddings": 8,
    },
}


def build(build_name, kind):
    name, options = BUILDS[build_name]
    options = {**SIZES, **options}
    scaling = {"rope_type": kind, **SCALINGS[kind]}
    module = randomise(hl.attention(name, **options, rope_scaling=scaling).double(), 0, 0.5).eval()
    s = settings(name, **options)
    virtual = name == "iha" and s.phase == "virtual"
    return module, ORACLES[name], s, s.pseudo_heads if virtual else 1


def scale(s, kind, length):
    """transformers' frequencies for a model whose heads are 6 wide, at `length` positions."""
    most = SCALINGS[kind].get("max_position_embeddings", SCALINGS[kind].get("original_max_position_embeddings", 64))
    parameters = {"rope_type": kind, "rope_theta": 500.0, **SCALINGS[kind]}
    parameters.pop("max_position_embeddings", None)
    config = LlamaConfig(
        hidden_size=18, num_attention_heads=3, head_dim=6, max_position_embeddings=most, rope_parameters=parameters
    )
    frequencies, s.rope_factor = ROPE_INIT_FUNCTIONS[kind](config, device=None, seq_len=torch.tensor(length))
    s.inv_freq = frequencies.double().tolist()


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", BUILDS)
def test_equals_the_oracle(name, kind):
    """The lengths given to a scaling are T, or T P in virtual phase; the attention factor is applied once."""
    module, oracle, s, times = build(name, kind)
    scale(s, kind, 7 * times)
    assert kind == "llama3" or s.rope_factor != 1 or s.inv_freq != settings("mha", **SIZES).inv_freq
    tolerance = 1e-6 if kind == "linear" else 1e-10  # ours is float64 there, transformers' frequencies float32
    assert_matches(module, oracle, s, draw(1, 7, 11), tolerance)


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize("name", BUILDS)
def test_cached_equals_uncached(name, kind):
    """Step by step; where frequencies follow the length, each step equals the full pass of that length."""
    module, *_ = build(name, kind)
    x = draw(1, 7, 11)
    cache = hl.Cache()
    for start, end in itertools.pairwise([0, 2, 3, 4, 5, 6, 7]):
        found = module(x[:, start:end], cache=cache)[:, -1]
        assert_close(found.detach(), module(x[:, :end])[:, -1].detach(), f"token {end - 1}", 1e-10)


def test_the_factor_of_yarn_changes_scores():
    module, oracle, s, _times = build("mha", "yarn")
    scale(s, "yarn", 7)
    assert s.rope_factor > 1.1
    s.rope_factor = 1.0
    wrong = oracle.output(dict(module.named_parameters()), draw(1, 7, 11), s)
    assert (module(draw(1, 7, 11)) - wrong).abs().max() > 1e-2
