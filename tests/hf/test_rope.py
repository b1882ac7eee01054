"""Rotary scalings are transformers' own."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from headloom.core.errors import HeadloomError
from headloom.hf.model.rope import FamilyRotary, from_parameters, provide, scaling_types, to_parameters
from headloom.ops.rotary import Rotary

SCALINGS = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(6)],
        "long_factor": [2.0 + i for i in range(6)],
        "original_max_position_embeddings": 32,
    },
}


def theirs(kind, length):
    parameters = {"rope_type": kind, "rope_theta": 500.0, **SCALINGS.get(kind, {})}
    config = LlamaConfig(hidden_size=48, num_attention_heads=4, max_position_embeddings=64, rope_parameters=parameters)
    positions = torch.arange(length)[None]
    return config, LlamaRotaryEmbedding(config)(torch.zeros(1), positions)


@pytest.mark.parametrize("length", [8, 100])
@pytest.mark.parametrize("kind", ["default", *SCALINGS])
def test_tables_are_llamas(kind, length):
    config, (cos, sin) = theirs(kind, length)
    theta, scaling = from_parameters(config.rope_parameters, config.max_position_embeddings)
    assert theta == 500.0 and (scaling is None) is (kind == "default")
    for rotary in (Rotary(theta, 12, scaling), FamilyRotary(theta, 12, scaling)):
        ours = rotary.tables(torch.arange(length), torch.float32, length=length)
        torch.testing.assert_close(ours[0], cos[0], rtol=0, atol=2e-5)
        torch.testing.assert_close(ours[1], sin[0], rtol=0, atol=2e-5)
    exact = FamilyRotary(theta, 12, scaling).tables(torch.arange(length), torch.float32, length=length)
    assert torch.equal(exact[0], cos[0]) and torch.equal(exact[1], sin[0])
    if scaling is not None:
        back = {k: v for k, v in to_parameters(theta, scaling).items() if v is not None}
        assert back == {k: v for k, v in config.rope_parameters.items() if v is not None}


def test_partial_rotation_is_not_cut_twice():
    whole, _ = provide({"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5}, 100.0, 6)
    assert whole.shape == (3,)


def test_half_tables_would_be_wrong():
    """2048 positions at width 32: half-precision angles miss by up to 0.78 and 1.99; ours stay within 1e-3."""
    positions = torch.arange(2048)
    wanted = Rotary(10000.0, 32).tables(positions, torch.float64)[0]
    for dtype, fault in ((torch.float16, 0.78), (torch.bfloat16, 1.99)):
        inv_freq = (10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)).to(dtype)
        angles = positions.to(dtype)[:, None] * inv_freq
        half = torch.cat((angles, angles), -1).cos().double()
        assert (half - wanted).abs().max() > 0.9 * fault
        ours = Rotary(10000.0, 32).tables(positions, dtype)[0]
        assert ours.dtype == torch.float32
        assert (ours.double() - wanted).abs().max() < 1e-3


def test_unknown_and_impossible_scalings():
    assert {"yarn", "llama3"} <= set(scaling_types())
    with pytest.raises(HeadloomError, match=r"unknown rotary scaling 'yarm'\. Did you mean 'yarn'"):
        provide({"rope_type": "yarm"}, 100.0, 8)
    with pytest.raises(HeadloomError, match="'low_freq_factor' is missing"):
        provide({"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 8}, 100.0, 8)
