"""A family is one file: registered from anywhere it is grafted, saved and loaded like those of the package."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.core.registry import Registry
from headloom.hf import register_family
from headloom.hf.model import family
from headloom.hf.model.family import _FAMILIES, families

FILE = '''
"""SmolLM3: Llama whose every fourth layer does not rotate."""

from headloom.hf import register_family
from headloom.hf.model.family import Decoder


class SmolLM3(Decoder):
    name = "smollm3"
    attention = "SmolLM3Attention"

    def common(self, config, index):
        found = super().common(config, index)
        return found if config.no_rope_layers[index] else {**found, "rope_theta": None, "rope_scaling": None}


FAMILY = register_family(SmolLM3())
'''


@pytest.fixture
def model():
    sizes = {"vocab_size": 37, "hidden_size": 24, "intermediate_size": 29, "num_hidden_layers": 4, "pad_token_id": 0}
    torch.manual_seed(0)
    config = SmolLM3Config(**sizes, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.5)
    return SmolLM3ForCausalLM(config).double().eval()


@pytest.fixture
def toy(tmp_path):
    """The family of the file, until the test is over."""
    assert "smollm3" not in families()
    (tmp_path / "smollm3_family.py").write_text(FILE)
    spec = importlib.util.spec_from_file_location("smollm3_family", tmp_path / "smollm3_family.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del _FAMILIES._items["smollm3"]


def test_it_is_grafted_saved_and_loaded(model, toy, tmp_path):
    x = torch.randint(3, 37, (2, 9), generator=torch.Generator().manual_seed(0))
    grafted = hl.graft(model, layers={"0": ("sas", {"simulated_heads": 8}), "1-3": ("iha", {"pseudo_heads": 2})})
    assert grafted.graft_report.exact
    assert [a.rotary is None for a in grafted.grafted()] == [False, False, False, True]
    with torch.no_grad():
        torch.testing.assert_close(grafted(x).logits, model(x).logits, rtol=0, atol=1e-9)
        grafted.model.layers[3].self_attn.q_mix.weight.mul_(1.5)
        wanted = grafted(x).logits
        assert (wanted - model(x).logits).abs().max() > 1e-3
        grafted.save_pretrained(tmp_path / "saved")
        back = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert type(back).__name__ == "HeadloomSmolLM3ForCausalLM"
        torch.testing.assert_close(back(x).logits, wanted, rtol=0, atol=1e-9)
        plain = hl.fold(hl.graft(model, "gqa"))
        torch.testing.assert_close(plain(x).logits, model(x).logits, rtol=0, atol=1e-9)


def test_without_its_file_it_is_unknown(model):
    with pytest.raises(HeadloomError, match=r"model family 'smollm3' is not known here.*headloom\.hf\.register_family"):
        hl.graft(model, "iha", pseudo_heads=2)


def test_what_cannot_be_registered(toy, monkeypatch):
    with pytest.raises(TypeError, match="model family 'smollm3' is registered twice"):
        register_family(toy.SmolLM3())
    with monkeypatch.context() as first, pytest.raises(TypeError, match="model family 'llama' is registered twice"):
        first.setattr(family, "_FAMILIES", Registry("model family"))  # as in a process that has asked for none yet
        family._walk.cache_clear()
        register_family(type("Mine", (toy.SmolLM3,), {"name": "llama"})())
    with pytest.raises(TypeError, match="takes an instance of a subclass of Family, not <class"):
        register_family(toy.SmolLM3)
