"""A mechanism is one file and a registration: it then appears in the list, costs, comparisons and grafts."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

import headloom as hl
from headloom.cli.app import app
from headloom.mechanism.registry import _MECHANISMS

FILE = '''
"""Attention whose heads have a temperature each. arXiv:0000.00000.

o_h = softmax(t_h q_h k_g^T / sqrt K) v_g, t_h = 1 at the start. Cache per token: 2 G K.
"""

import dataclasses

import torch

from headloom.contract.config import AttentionConfig, need
from headloom.contract.attention import Attention
from headloom.ops.mixing import Mix


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToyConfig(AttentionConfig):
    """As `AttentionConfig`; warmth: every t_h at the start."""

    warmth: float = 1.0

    def __post_init__(self):
        super().__post_init__()
        need(self.warmth > 0, f"warmth must be above 0, not {self.warmth}")

    @property
    def exact(self):
        return self.warmth == 1.0


class Toy(Attention):
    name = "toy"
    title = "Toy attention"
    paper = "arXiv:0000.00000"
    summary = "heads with a temperature each"
    config_cls = ToyConfig

    def build_heads(self):
        self.heat = Mix(self.config.num_heads)

    @torch.no_grad()
    def reset_heads(self):
        self.heat.weight.fill_(self.config.warmth)

    def queries(self, q_BHTK, positions_BT, length):
        return super().queries(q_BHTK * self.heat.weight[:, None, None].to(q_BHTK.dtype), positions_BT, length)
'''


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """The file in a folder of its own, registered for the time of these tests."""
    path = tmp_path_factory.mktemp("mine") / "toy.py"
    path.write_text(FILE)
    found = importlib.util.spec_from_file_location("toy", path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    before, sys.modules["toy"] = dict(_MECHANISMS._items), module
    try:
        yield hl.register(module.Toy)
    finally:
        del sys.modules["toy"]
        _MECHANISMS._items.clear()
        _MECHANISMS._items.update(before)


def call(*arguments):
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 0, done.output
    return done.stdout


def test_list(toy):
    assert hl.mechanisms()["toy"].cls is toy
    assert "Toy attention" in call("list") and "| `toy` | **Toy attention**: heads with" in call("list", "--markdown")
    row = {row["name"]: row for row in json.loads(call("list", "--costs", "--json"))}["toy"]
    assert (row["cache"], row["flops"], row["grafts"]) == ("2 G K = 1,536", "T^2, 1 x", True)
    assert row["parameters"] == 4 * 768 * 768 + 12


def test_cost(toy):
    layer = json.loads(call("cost", "toy:warmth=2:num_kv_heads=2", "--json"))["attention"]
    assert layer["parameters"] == 2 * 128 * 128 + 2 * 128 * 32 + 8 and layer["cache_elements_per_token"] == 2 * 32
    assert "toy at size tiny" in call("cost", "toy")
    assert hl.cost("toy", hidden_size=8, num_heads=2, projection="bit").parameter_bytes_packed == 4 * (13 + 4) + 8


def test_compare(toy, tmp_path):
    text = tmp_path / "words.txt"
    text.write_text("\n".join(f"the {i} brown foxes jump over {i * i % 97} dogs" for i in range(900)))
    variants = ["--variants", "mha,toy,toy:warmth=0.5"]
    small = ["--tokens", "16", "--batch-size", "2", "--steps", "1", "--seeds", "1", "--threads", "1"]
    out = call("compare", *variants, "--data", str(text), "--out", str(tmp_path / "study"), *small)
    assert "toy:warmth=0.5" in out
    results = json.loads((tmp_path / "study" / "results.json").read_text())
    found = {variant["label"]: variant["bits_per_byte"]["mean"] for variant in results["variants"]}
    assert set(found) == {"mha", "toy", "toy:warmth=0.5"} and all(value > 0 for value in found.values())
    refused = CliRunner().invoke(app, ["compare", "--variants", "mha,toy:warmht=2"])
    assert refused.exit_code == 2 and "Did you mean 'warmth'?" in refused.stderr
    with pytest.raises(hl.HeadloomError, match="warmth must be above 0, not 0"):
        hl.attention("toy", hidden_size=8, num_heads=2, warmth=0)


def test_graft(toy, tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=29, max_position_embeddings=32,
    )  # fmt: skip
    model, ids = LlamaForCausalLM(config).double().eval(), torch.randint(0, 37, (2, 7))
    wanted = model(ids).logits
    with pytest.raises(hl.HeadloomError, match="does not start as the attention it replaces"):
        hl.graft(model, "toy", warmth=2.0)
    model = hl.graft(model, "toy")
    report = model.graft_report
    assert report.exact and report.parameters_added == 2 * 4
    torch.testing.assert_close(model(ids).logits, wanted, rtol=0, atol=1e-10)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(back(ids).logits, wanted, rtol=0, atol=1e-10)
    assert back.model.layers[1].self_attn.heat.weight.tolist() == [1.0] * 4


def test_schedules_and_models(toy):
    layers = hl.schedule(["toy", "mha"], num_layers=3, windows=[4, None])
    sizes = {"vocab_size": 37, "hidden_size": 24, "num_heads": 4, "intermediate_size": 29, "max_positions": 32}
    model = hl.build_model(layers, num_layers=3, **sizes).eval()
    assert [layer.self_attn.name for layer in model.model.layers] == ["toy", "mha", "toy"]
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=3, do_sample=False).shape == (1, 5)
