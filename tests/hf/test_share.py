"""Folders that travel: shards, devices, the model card; damaged and foreign files are named."""

import shutil

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.utils.hub import PushToHubMixin

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.hf.model.mixin import Graft

SHARDS = "20KB"


@pytest.fixture
def graft(llama):
    """graft(...): a small grafted Llama."""

    def make(pseudo_heads=2, **changes):
        model = llama(num_hidden_layers=2, **changes)
        model = hl.graft(model, "iha", layers=1, pseudo_heads=pseudo_heads)
        return model

    return make


def test_what_a_folder_holds(graft, tmp_path):
    """Weights in shards, the tied tensor once, both configs, and a card with the hub's metadata."""
    model = graft()
    model.config._name_or_path = "owner/original"
    model.save_pretrained(tmp_path / "mine", max_shard_size=SHARDS)
    shards = sorted(path.name for path in (tmp_path / "mine").glob("*.safetensors"))
    names = {path.name for path in (tmp_path / "mine").iterdir()} - set(shards)
    assert names == {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"}
    held = [key for shard in shards for key in load_file(tmp_path / "mine" / shard)]
    assert len(shards) > 1 and sorted(held) == sorted(set(model.state_dict()) - {"lm_head.weight"})
    card = ModelCard.load(tmp_path / "mine" / "README.md")
    assert card.data.library_name == "transformers" and card.data.tags == ["headloom", "iha"]
    assert card.data.base_model == "owner/original" and card.data.pipeline_tag == "text-generation"
    assert "iha in 1 of 2 layers" in card.text and 'from_pretrained("mine")' in card.text


def test_a_card_that_is_there_stays(graft, tmp_path):
    (tmp_path / "README.md").write_text("mine")
    graft().save_pretrained(tmp_path)
    assert (tmp_path / "README.md").read_text() == "mine"


def test_a_pushed_model_is_tagged(graft, monkeypatch):
    pushed = {}
    monkeypatch.setattr(PushToHubMixin, "push_to_hub", lambda self, name, **given: pushed.update(given))
    graft().push_to_hub("owner/mine", tags=["more"])
    assert pushed["tags"] == ["headloom", "more"] and LlamaForCausalLM.model_tags is None


@pytest.mark.parametrize("where", ["cpu", "auto", {"": "cpu"}], ids=str)
def test_devices_and_types(graft, ids, tmp_path, where):
    model, x = graft(), ids(2, 6)
    model.save_pretrained(tmp_path, max_shard_size=SHARDS)
    back = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where)
    torch.testing.assert_close(back(x).logits, model(x).logits, rtol=0, atol=1e-12)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, device_map=where, dtype="bfloat16")
    assert half.dtype == torch.bfloat16 and half.model.layers[1].self_attn.k_mix.weight.dtype == torch.float32


def test_loading_allocates_nothing_but_the_files(graft, tmp_path, monkeypatch):
    graft().save_pretrained(tmp_path)
    built, inner = set(), Graft.keep_mixes_wide

    def look(self):
        built.update(parameter.device.type for parameter in self.parameters())
        inner(self)

    monkeypatch.setattr(Graft, "keep_mixes_wide", look)
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert built == {"meta"}


@pytest.mark.parametrize("spec", [("iha", {"pseudo_heads": 2}), ("sas", {"simulated_heads": 8}), ("mla", {})])
def test_offloaded_weights_are_brought(mixed, ids, tmp_path, spec):
    """accelerate moves weights in when a module is called; mixes are only read, and are there all the same."""
    model, x = mixed([spec, spec]), ids(2, 6)
    model.save_pretrained(tmp_path / "model")
    others = ("model.embed_tokens", "model.layers.0", "model.norm", "model.rotary_emb", "lm_head")
    where = {**dict.fromkeys(others, "cpu"), "model.layers.1": "disk"}
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model", device_map=where, offload_folder=tmp_path / "off")
    attention = back.model.layers[1].self_attn
    assert next(attention.parameters()).is_meta
    with torch.no_grad():
        torch.testing.assert_close(back(x).logits, model(x).logits, rtol=0, atol=1e-12)
        settings = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
        assert torch.equal(back.generate(x, **settings), model.generate(x, **settings))
    assert all(p.is_meta for p in attention.parameters())


def cut(path):
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 50)


DAMAGE = {
    "cut off": (cut, "is cut off or is not a safetensors file .*incomplete"),
    "empty": (lambda path: path.write_bytes(b""), "is cut off or is not a safetensors file"),
    "text": (lambda path: path.write_text("not found\n" * 99), "is cut off or is not a safetensors file"),
    "gone": (lambda path: path.unlink(), "is missing"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_shard_is_named(graft, tmp_path, damage):
    graft().save_pretrained(tmp_path, max_shard_size=SHARDS)
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    harm, message = DAMAGE[damage]
    harm(shard)
    with pytest.raises(HeadloomError, match=f"{shard.name} {message}.*again"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_files_of_another_model_are_named(graft, llama, tmp_path):
    """The original's weights, a strange model's, and those of another graft, each under our config.json."""
    graft().save_pretrained(tmp_path / "mine")
    llama(num_hidden_layers=2).save_pretrained(tmp_path / "original")
    graft(pseudo_heads=3).save_pretrained(tmp_path / "other")
    (tmp_path / "strange").mkdir()
    save_file({"encoder.weight": torch.zeros(3, 3)}, tmp_path / "strange" / "model.safetensors")
    mix = r"they lack model.layers.1.self_attn.k_mix.weight.* and 1 more\. Copy the whole folder"
    strange = "they lack model.embed_tokens.weight.*; instead they hold encoder.weight"
    for name, message in (("original", mix), ("strange", strange)):
        shutil.copy(tmp_path / name / "model.safetensors", tmp_path / "mine" / "model.safetensors")
        with pytest.raises(HeadloomError, match=f"mine are not those of its config.json: {message}"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    shutil.copy(tmp_path / "other" / "model.safetensors", tmp_path / "mine" / "model.safetensors")
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
