"""Saving and loading: what is written, what comes back, and who fails to read it."""

import json
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
    pipeline,
)

import headloom.hf  # noqa: F401  registers the folder's model type
from headloom.core.errors import HeadloomError
from headloom.hf import graft
from headloom.hf.model.classes import HeadloomLlamaForCausalLM
from headloom.hf.model.config import config_class


def equal(one, two):
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def same_logits(one, two, x):
    """Not bit-equal: a loaded tensor lies elsewhere in memory, and the last bits of a product depend on that."""
    torch.testing.assert_close(one(x).logits, two(x).logits, rtol=0, atol=1e-12)


def keys(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_comes_back_bit_equal(tiny, ids, variant, tmp_path, tied):
    model, x = tiny(variant, tie_embeddings=tied, rope_scaling={"rope_type": "linear", "factor": 2.0}), ids(2, 6)
    model.save_pretrained(tmp_path)
    back = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(back) is type(model) and back.dtype == torch.float64
    assert equal(model, back)
    same_logits(model, back, x)
    assert [a.config for a in back.grafted()] == [a.config for a in model.grafted()]
    assert back.config.model_type == "llama" and back.config._attn_implementation == "headloom"
    assert (back.lm_head.weight is back.model.embed_tokens.weight) is tied
    assert ("lm_head.weight" in keys(tmp_path)) is not tied
    back.save_pretrained(tmp_path / "again")
    first, second = ((folder / "config.json").read_text() for folder in (tmp_path, tmp_path / "again"))
    assert first == second


def test_what_is_written(tiny, tmp_path):
    model = tiny("iha", options={"window": 4})
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["model_type"] == "headloom" and written["family"] == "llama"
    assert "import headloom" in written["hidden_size"]
    assert "model_type" not in written["backbone"] and written["backbone"]["hidden_size"] == 24
    layer = written["headloom"]["layers"][1]
    assert layer["mechanism"] == "iha" and layer["options"]["pseudo_heads"] == 3 and layer["options"]["window"] == 4
    assert "hidden_size" not in layer["options"], "the backbone says it already"
    names = {name.removeprefix("model.layers.0.self_attn.") for name in keys(tmp_path) if ".0.self_attn." in name}
    mixes = {f"{letter}_mix.weight" for letter in ("q", "k", "v", "out")}
    assert names == mixes | {f"{letter}_proj.weight" for letter in "qkvo"}
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config).__name__ == "HeadloomLlamaConfig" and config.hidden_size == 24 and config.sliding_window == 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_types_are_respected_and_mixes_stay_wide(tiny, ids, tmp_path, dtype):
    model = tiny("iha", dtype=torch.float32)
    model.save_pretrained(tmp_path / "wide")
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "wide", dtype=dtype)
    attention = half.model.layers[0].self_attn
    assert half.dtype == dtype == attention.q_proj.weight.dtype
    assert torch.equal(attention.q_mix.weight, model.model.layers[0].self_attn.q_mix.weight)
    half.save_pretrained(tmp_path / "half")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert equal(half, back) and back.dtype == dtype
    assert back(ids(1, 5)).logits.isfinite().all()


@pytest.mark.parametrize("spec", [("iha", {"pseudo_heads": 2}), ("sas", {"simulated_heads": 8}), ("gqa", {})])
def test_a_graft_comes_back(llama, ids, tmp_path, spec):
    model, x = llama(), ids(2, 7)
    model = graft(model, spec[0], layers="0,2", **spec[1])
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    back = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert equal(model, back)
    same_logits(model, back, x)
    assert type(back.model.layers[1].self_attn).__name__ == "LlamaAttention"
    assert torch.equal(model.generate(x, max_new_tokens=4), back.generate(x, max_new_tokens=4))


@pytest.mark.parametrize("spec", [("iha", "carrier"), ("iha", "identity"), ("sas", "identity"), ("gqa", None)])
def test_a_base_checkpoint_loads_into_the_graft_class(llama, ids, tmp_path, spec):
    """Mixes are what the init says and the logits the base's: the loader leaves no memory uninitialised."""
    mechanism, init = spec
    base, x = llama(), ids(2, 9)
    base.save_pretrained(tmp_path)
    options = {} if init is None else {"init": init}
    if mechanism == "iha":
        options |= {"pseudo_heads": 2, "order": "token", "phase": "token"}
    layers = [{"mechanism": mechanism, "options": options}] * 3
    model = HeadloomLlamaForCausalLM.from_pretrained(tmp_path, headloom={"layers": layers})
    torch.testing.assert_close(model(x).logits, base(x).logits, rtol=0, atol=1e-9)
    own = model.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in base.state_dict().items())
    if mechanism == "iha":
        mixes = model.model.layers[2].self_attn
        eye = torch.eye(4, dtype=torch.float64)
        assert torch.equal(mixes.q_mix.weight[:, 1], eye)
        assert torch.equal(mixes.k_mix.weight[:, 0], eye.view(4, 2, 2).sum(-1))
        apart = mixes.v_mix.weight - mixes.v_mix.weight.mean(1, keepdim=True)
        assert 0.1 < apart.std() < 0.5
    if mechanism == "sas":
        assert torch.equal(
            model.model.layers[2].self_attn.feature_q[1].weight, torch.zeros(14, 14, dtype=torch.float64)
        )


def test_given_a_spec_a_file_that_lacks_one_mix_keeps_the_others(tiny, tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny("iha")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.layers.0.self_attn.q_mix.weight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    spec = {"layers": model.config.headloom["layers"]}
    back, info = AutoModelForCausalLM.from_pretrained(tmp_path, headloom=spec, output_loading_info=True)
    assert info["missing_keys"] == {missing}
    own = back.state_dict()
    assert all(torch.equal(own[name], tensor) for name, tensor in tensors.items())
    assert torch.equal(own[missing], torch.eye(4, dtype=torch.float64)[:, None].expand(4, 3, 4))


def test_the_class_says_when_it_lacks_a_spec(llama, tmp_path):
    llama().save_pretrained(tmp_path)
    with pytest.raises(HeadloomError, match="does not say what the attention is"):
        HeadloomLlamaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(HeadloomError, match="describes 1 layers' attention, the llama model has 3"):
        HeadloomLlamaForCausalLM.from_pretrained(tmp_path, headloom={"layers": [None]})
    with pytest.raises(HeadloomError, match="unknown mechanism 'ihha'"):
        HeadloomLlamaForCausalLM.from_pretrained(tmp_path, headloom={"layers": [{"mechanism": "ihha"}] * 3})
    with pytest.raises(HeadloomError, match="layer 0 must be null or"):
        HeadloomLlamaForCausalLM.from_pretrained(tmp_path, headloom={"layers": ["iha"] * 3})


@pytest.mark.parametrize("damage", ["backbone", "headloom", "family", "format"])
def test_a_damaged_config_is_named(tiny, tmp_path, damage):
    tiny("mha").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    if damage == "format":
        written["headloom"]["format"] = 99
    else:
        del written[damage]
    path.write_text(json.dumps(written))
    message = {"family": "model family 'None' is not known", "format": "format 99, newer than 1"}.get(damage, "damaged")
    with pytest.raises(HeadloomError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("other", [LlamaForCausalLM, LlamaModel, LlamaConfig])
def test_other_classes_fail_with_the_sentence(tiny, tmp_path, other):
    tiny("iha").save_pretrained(tmp_path)
    with pytest.raises(Exception, match=r"Headloom graft of a llama model.*import headloom"):
        other.from_pretrained(tmp_path)


def test_without_the_import_nothing_loads(tiny, tmp_path):
    """AutoModel and pipeline in a process that has not imported headloom: an unknown model type, at once."""
    tiny("iha").save_pretrained(tmp_path)
    script = f"""
from transformers import AutoModelForCausalLM, pipeline
for load in (AutoModelForCausalLM.from_pretrained, lambda path: pipeline("text-generation", model=path)):
    try:
        load({str(tmp_path)!r})
    except ValueError as error:
        assert "headloom" in str(error), error
        print("refused")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["refused", "refused"], done.stderr


def test_pipeline_and_tokenizer_from_one_folder(tiny, tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(37)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w2", unk_token="w3")
    tiny("iha", dtype=torch.float32).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert AutoTokenizer.from_pretrained(tmp_path)("w5 w6").input_ids == [5, 6]
    out = pipeline("text-generation", model=str(tmp_path))("w5 w6", max_new_tokens=3, do_sample=False)
    assert out[0]["generated_text"].startswith("w5 w6") and len(out[0]["generated_text"]) > 8


def test_config_round_trips_in_memory(tiny):
    config = tiny("sas").config
    cls = type(config)
    assert cls is config_class("llama")
    assert cls.from_dict(config.to_dict()).to_dict() == config.to_dict()
    assert config.to_dict()["model_type"] == "llama"
