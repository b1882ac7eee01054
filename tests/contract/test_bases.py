"""A base owns its options: a mechanism has those of the bases it can stand on, and a new base is one file."""

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest
import torch
from oracles.compare import assert_close, draw
from typer.testing import CliRunner

import headloom as hl
from headloom.cli.app import app
from headloom.contract.bases import BASES
from headloom.costs.formula import cache_formula
from headloom.mechanism import layer_config
from headloom.mechanism.registry import _MECHANISMS

SIZES = {"hidden_size": 16, "num_heads": 4}
OF_BASES = ("q_rank", "latent_dim", "plain_dim", "k_rank", "v_rank", "kv_only")

FILE = '''
"""Base squeezed: one key head, and values of all heads from a narrow z. arXiv:0000.00000."""

import dataclasses
from typing import Annotated

from torch import nn

from headloom.contract.attention import Attention
from headloom.contract.bases import BASES, Base
from headloom.contract.common import FILLED, CommonOptions, Filled, need
from headloom.contract.config import AttentionConfig
from headloom.mechanism.iha import IHA, IHAConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqueezedOptions(CommonOptions):
    squeezed_dim: Annotated[Filled[int], "Z: the width of what values come from. None: K"] = FILLED


class SqueezedBase(Base[SqueezedOptions]):
    options = SqueezedOptions
    tiny = {"squeezed_dim": 7}
    turned = "k"

    def complete(self, config):
        config.fill("squeezed_dim", config.head_dim)
        need(config.squeezed_dim <= config.hidden_size, f"squeezed_dim {config.squeezed_dim} does not narrow x")

    def build(self, attn):
        c = attn.config
        attn.q_proj = nn.Linear(c.hidden_size, c.num_heads * c.head_dim, bias=False)
        attn.k_proj = nn.Linear(c.hidden_size, c.head_dim, bias=False)
        attn.z_proj = nn.Linear(c.hidden_size, c.squeezed_dim, bias=False)
        attn.v_up = nn.Linear(c.squeezed_dim, c.num_heads * c.value_dim, bias=False)

    def slots(self, config):
        return {"k": (1, config.head_dim), "z": (1, config.squeezed_dim)}

    def project(self, attn, x_BTD):
        q = attn.q_proj(x_BTD).unflatten(-1, (attn.config.num_heads, -1)).transpose(1, 2)
        return q, {"k": attn.k_proj(x_BTD)[:, None], "z": attn.z_proj(x_BTD)[:, None]}

    def expand(self, attn, slots):
        H = attn.config.num_heads
        v = attn.v_up(slots["z"][:, 0]).unflatten(-1, (H, -1)).transpose(1, 2)
        return slots["k"].expand(-1, H, -1, -1), v


BASES.add("squeezed", SqueezedBase())


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqueezedConfig(SqueezedOptions, AttentionConfig):
    base: str = "squeezed"
    bases = ("squeezed",)


class Squeezed(Attention[SqueezedConfig]):
    name, title, paper, summary = "squeezed", "Squeezed values", "arXiv:0000.00000", "one key, narrow values"
    config_cls = SqueezedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SqueezedIHAConfig(SqueezedOptions, IHAConfig):
    base: str = "squeezed"
    bases = ("squeezed",)


class SqueezedIHA(IHA):
    name = "squeezed_iha"
    config_cls = SqueezedIHAConfig
'''


@pytest.fixture(scope="module")
def squeezed(tmp_path_factory):
    """The file in a folder of its own, registered for the time of these tests."""
    path = tmp_path_factory.mktemp("mine") / "squeezed.py"
    path.write_text(FILE)
    found = importlib.util.spec_from_file_location("squeezed", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    registries = (_MECHANISMS, BASES)
    before = [dict(registry._items) for registry in registries]
    sys.modules["squeezed"] = module
    try:
        found.loader.exec_module(module)
        for cls in (module.Squeezed, module.SqueezedIHA):
            hl.register(cls)
        yield module
    finally:
        del sys.modules["squeezed"]
        for registry, items in zip(registries, before, strict=True):
            registry._items.clear()
            registry._items.update(items)


def test_a_new_base_is_one_file(squeezed):
    attn = hl.attention("squeezed", **SIZES, squeezed_dim=3).double()
    x = draw(2, 5, 16)
    cache = hl.Cache()
    parts = torch.cat([attn(part, cache=cache) for part in x.split([3, 1, 1], 1)], 1)
    assert_close(parts.detach(), attn(x).detach(), "cached", 1e-12)
    assert {name: tuple(slot.shape) for name, slot in cache.held().slots.items()} == {
        "k": (2, 1, 5, 4),
        "z": (2, 1, 5, 3),
    }
    assert attn.config.to_dict()["squeezed_dim"] == 3 and hl.make_config("squeezed", **SIZES).squeezed_dim == 4
    assert type(attn.config).tiny().squeezed_dim == 7
    for wrong, words in ({"squeezed_dim": 0}, "at least 1, not 0"), ({"squeezed_dim": 17}, "does not narrow x"):
        with pytest.raises(hl.HeadloomError, match=words):
            hl.attention("squeezed", **SIZES, **wrong)


def test_a_new_base_has_its_costs_and_its_page(squeezed):
    cost = hl.cost("squeezed", **SIZES, squeezed_dim=3, tokens=8)
    assert cost.parameters == 16 * (16 + 4 + 3) + 3 * 16 + 16 * 16 and cost.cache_elements_per_token == 4 + 3
    info = hl.mechanisms()["squeezed"]
    assert cache_formula(info, hl.make_config("squeezed", **SIZES, squeezed_dim=3)) == ("Z + K", "")
    shown = CliRunner().invoke(app, ["list", "squeezed"])
    assert shown.exit_code == 0 and "Options of base squeezed" in shown.stdout and "squeezed_dim" in shown.stdout


def test_a_mechanism_stands_on_a_new_base(squeezed):
    """iha's exact start over it computes what the base does."""
    torch.manual_seed(0)
    start = {"pseudo_heads": 2, "order": "token", "phase": "token"}
    plain, iha = hl.attention("squeezed", **SIZES).double(), hl.attention("squeezed_iha", **SIZES, **start).double()
    assert not iha.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    iha.reset_heads()
    x = draw(2, 5, 16)
    assert_close(iha(x).detach(), plain(x).detach(), "exact", 1e-12)
    assert iha.cache_slots() == plain.cache_slots()


def test_a_model_is_built_on_a_new_base(squeezed, tmp_path):
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "intermediate_size": 8, "max_positions": 32}
    model = hl.build_model(("squeezed", {"squeezed_dim": 3}), num_layers=2, **sizes).eval()
    ids = torch.tensor([[3, 4, 5]])
    cached, plain = (model.generate(ids, use_cache=use, max_new_tokens=4, do_sample=False) for use in (True, False))
    assert torch.equal(cached, plain)
    model.save_pretrained(tmp_path)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path).generate(ids, max_new_tokens=4), cached)


@pytest.mark.parametrize("name", ["mha", "gqa", "diff", "deltaformer", "linear"])
def test_options_of_other_bases_are_unknown(name):
    config = hl.make_config(name, **SIZES)
    assert not any(hasattr(config, option) for option in OF_BASES)
    assert not set(OF_BASES) & set(config.to_dict())
    with pytest.raises(hl.HeadloomError, match=rf"unknown option 'q_rank' of {name}"):
        hl.attention(name, **SIZES, q_rank=4)


def test_a_mechanism_has_the_options_of_its_bases_and_no_others():
    assert set(OF_BASES) & set(hl.make_config("mla", **SIZES).to_dict()) == {"q_rank", "latent_dim", "plain_dim"}
    assert set(OF_BASES) & set(hl.make_config("tpa", **SIZES).to_dict()) == {"q_rank", "k_rank", "v_rank", "kv_only"}
    assert set(OF_BASES) <= set(hl.make_config("iha", **SIZES).to_dict())
    for base, option, owners in ("gqa", "q_rank", "mla or tpa"), ("tpa", "plain_dim", "mla"), ("mla", "k_rank", "tpa"):
        with pytest.raises(hl.HeadloomError, match=f"{option} belongs to base {owners}, not to base '{base}': leave"):
            hl.attention("iha", **SIZES, base=base, **{option: 1})


#: a layer of config.json as it was written when every mechanism had the options of all bases
OLD = {
    "mechanism": "mha",
    "options": {
        "rotary_dim": 4, "softcap": None, "projection": "linear", "base": "mha", "score": "softmax", "scale": None,
        "q_rank": None, "latent_dim": None, "plain_dim": None, "k_rank": None, "v_rank": None, "kv_only": None,
    },
}  # fmt: skip


def test_folders_of_the_version_before_load(tmp_path):
    from transformers import AutoModelForCausalLM

    sizes = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "intermediate_size": 8, "max_positions": 32}
    model = hl.build_model("mha", num_layers=2, **sizes).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    assert "q_rank" not in json.dumps(written)
    path.write_text(json.dumps({**written, "headloom": {**written["headloom"], "layers": [OLD, OLD]}}))
    ids = torch.tensor([[3, 4, 5]])
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(back(ids).logits, model(ids).logits)
    assert layer_config("mha", SIZES, OLD["options"]) == hl.make_config("mha", **SIZES)
    with pytest.raises(hl.HeadloomError, match="unknown option 'q_rank' of mha"):
        layer_config("mha", SIZES, {**OLD["options"], "q_rank": 4})


def test_the_contract_names_no_base_and_no_mechanisms_idea():
    """Grouped queries are the contract's own default; all else is said by the base's or mechanism's file."""
    root = Path(hl.__file__).parent
    ideas = re.compile(r"pseudo|virtual|simulated_|" + "|".join(OF_BASES))
    grouped = {"mha", "gqa", "mqa", "linear"}  # a projection and a rotary scaling are called linear too
    names = re.compile("|".join(f"[\"']{name}[\"']" for name in {*BASES, *hl.mechanisms()} - grouped))
    for path in [*(root / "contract").glob("*.py"), *(root / "ops").glob("*.py")]:
        text = path.read_text(encoding="utf-8")
        assert not ideas.search(text), (path.name, ideas.search(text))
        assert not names.search(text), (path.name, names.search(text))
