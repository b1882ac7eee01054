"""Every command that takes MODEL, on a folder of every family: decoders go through, encoders are told why not."""

import json

import pytest
import torch
from published import default_config

from headloom.data.tokenizer import make_tokenizer
from headloom.hf.model.family import families

NORMED = {"qwen3", "olmo2", "gemma3_text"}  # their norm of queries and keys stands between mixes and projections
SMALL = ["--tokens", "16", "--batch-size", "2", "--steps", "1", "--threads", "1", "--validation-bytes", "64"]


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(f"the {i} brown foxes jump over {i * i % 97} dogs" for i in range(60)))
    return path


@pytest.fixture(scope="module", params=list(families()))
def checkpoint(request, tmp_path_factory):
    """(family, folder of its own tiny model over bytes)."""
    name = request.param
    # transformers multiplies experts in one product, whose rows must be aligned
    config = default_config(
        name, vocab_size=258, num_hidden_layers=2, bos_token_id=256, eos_token_id=256,
        **({"intermediate_size": 32} if name == "mixtral" else {}),
    )  # fmt: skip
    head = families()[name].head_classes()["AutoModelForCausalLM" if families()[name].causal(config) else "AutoModel"]
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(name) / "plain"
    head(config).save_pretrained(folder)
    make_tokenizer("bytes").save_pretrained(folder)
    return families()[name], folder


def test_every_command(checkpoint, call, text_file, tmp_path):
    family, folder = checkpoint
    encoder = not family.causal(default_config(family.name))

    def fine(*arguments):
        done = call(*arguments)
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "its function is kept" in fine("graft", folder, tmp_path / "one", "--to", "iha:pseudo_heads=1")
    fine("graft", folder, tmp_path / "two", "--to", "iha:pseudo_heads=2", "--layers", "1")
    folded = call("fold", tmp_path / "one", tmp_path / "folded")
    if family.name in NORMED:
        assert folded.exit_code == 2 and "not foldable: q_mix, k_mix, because the norm" in folded.stderr
    else:
        assert folded.exit_code == 0, folded.output
        assert json.loads((tmp_path / "folded" / "config.json").read_text())["model_type"] == family.name
    tune = ["--data", text_file, "--out", tmp_path / "tuned", *SMALL]
    if encoder:
        for source in (folder, tmp_path / "two"):
            for arguments in (["generate", source, "--prompt", "a"], ["finetune", source, "--only-grafted", *tune]):
                if source == folder and arguments[0] == "finetune":
                    arguments += ["--to", "iha:pseudo_heads=2"]
                done = call(*arguments)
                assert done.exit_code == 2 and done.stdout == ""
                assert f"is a {family.name} model, no causal language model" in done.stderr.splitlines()[-1]
        assert not (tmp_path / "tuned").exists()
        return
    written = [
        json.loads(fine("generate", source, "--prompt", "Once", "--max-new-tokens", "3", "--json"))
        for source in (folder, tmp_path / "two")
    ]
    assert written[0]["text"] == written[1]["text"] and written[0]["tokens"] == written[1]["tokens"] >= 1
    fine("generate", tmp_path / "two", "--prompt", "Once", "--max-new-tokens", "3", "--cache", "static")
    fine("finetune", folder, "--to", "iha:pseudo_heads=2", *tune)
    found = json.loads((tmp_path / "tuned" / "result.json").read_text())["arms"]
    grafted, plain = (found[arm]["before"]["bits_per_byte"] for arm in ("grafted", "ungrafted"))
    assert grafted == pytest.approx(plain, rel=1e-3) and found["grafted"]["runs"] and found["ungrafted"]["runs"]


def test_a_folder_without_a_language_model_head(call, tmp_path):
    """Its head would be random numbers."""
    config = default_config("llama", vocab_size=258, bos_token_id=256, eos_token_id=256)
    families()["llama"].head_classes()["AutoModel"](config).save_pretrained(tmp_path / "bare")
    make_tokenizer("bytes").save_pretrained(tmp_path / "bare")
    done = call("generate", tmp_path / "bare", "--prompt", "a")
    assert done.exit_code == 2 and "lacks the weights lm_head.weight of a causal language model" in done.stderr


def test_a_decoder_that_cannot_be_grafted_generates_all_the_same(call, tmp_path):
    config = default_config("gpt2", vocab_size=258, bos_token_id=256, eos_token_id=256, reorder_and_upcast_attn=True)
    families()["gpt2"].head_classes()["AutoModelForCausalLM"](config).save_pretrained(tmp_path / "plain")
    make_tokenizer("bytes").save_pretrained(tmp_path / "plain")
    done = call("generate", tmp_path / "plain", "--prompt", "a", "--max-new-tokens", "2")
    assert done.exit_code == 0, done.output
    refused = call("graft", tmp_path / "plain", tmp_path / "out", "--to", "iha:pseudo_heads=2")
    assert refused.exit_code == 2 and "reorder_and_upcast_attn=True cannot be grafted" in refused.stderr
