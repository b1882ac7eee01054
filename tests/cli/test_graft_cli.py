"""`headloom graft`: what is written, what is printed, what is refused."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, BertModel

import headloom  # noqa: F401  registers the folder's model type
from headloom.data.tokenizer import make_tokenizer


def logits(folder):
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.arange(40)[None]).logits, model


def test_a_graft_is_saved_with_its_tokenizer_and_computes_the_same(call, llama_folder, tmp_path):
    out = tmp_path / "new" / "grafted"
    out.parent.mkdir()
    done = call("graft", llama_folder, out, "--to", "iha", "--set", "pseudo_heads=3", "--layers", "1")
    assert done.exit_code == 0, done.output
    assert "iha in 1 of 2 layers; 144 parameters added" in done.stdout  # P H (H + 2 G) + H^2 P
    assert "its function is kept" in done.stdout and f"Saved in {out}" in done.stdout
    before, _ = logits(llama_folder)
    after, model = logits(out)
    torch.testing.assert_close(after, before, rtol=0, atol=2e-4 * float(before.max() - before.min()))
    assert [layer and layer["options"]["pseudo_heads"] for layer in model.config.headloom["layers"]] == [None, 3]
    assert AutoTokenizer.from_pretrained(out)("abc").input_ids == [97, 98, 99]
    assert [entry.name for entry in out.parent.iterdir()] == ["grafted"]


def test_as_json_in_another_type(call, llama_folder, tmp_path):
    done = call("graft", llama_folder, tmp_path / "out", "--to", "iha:pseudo_heads=2:init=identity", "--json",
                "--set", "iha.pseudo_heads=3", "--dtype", "float64")  # fmt: skip
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    config = found["layers"][0]["config"]
    assert (config["pseudo_heads"], config["init"]) == (3, "identity"), "--set wins over the options after colons"
    assert found["exact"] and found["relative"] < 1e-12
    assert logits(tmp_path / "out")[1].dtype == torch.float64


def test_a_change_is_made_only_when_it_is_allowed(call, llama_folder, tmp_path):
    arguments = ["graft", llama_folder, tmp_path / "out", "--to", "iha:pseudo_heads=2:init=normal"]
    refused = call(*arguments)
    assert refused.exit_code == 2 and "does not start as the attention it replaces" in refused.stderr
    assert not (tmp_path / "out").exists()
    allowed = call(*arguments, "--allow-change")
    assert allowed.exit_code == 0 and "NOT kept" in allowed.stdout


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--to", "ihaa"], "unknown mechanism 'ihaa'. Did you mean 'iha'?"),
        (["--to", "iha", "--set", "pseudo_head=2"], "Did you mean 'pseudo_heads'?"),
        (["--to", "iha", "--set", "pseudo_heads"], "--set must look like name=value"),
        (["--to", "iha:pseudo_heads=2", "--layers", "0-9"], "layer 2 does not exist"),
        (["--to", "iha:pseudo_heads=2", "--dtype", "float23"], "Did you mean 'float32'?"),
    ],
)
def test_wrong_calls(call, llama_folder, tmp_path, arguments, part):
    done = call("graft", llama_folder, tmp_path / "out", *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert part in done.stderr and len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_stays(call, llama_folder, tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    done = call("graft", llama_folder, tmp_path, "--to", "iha:pseudo_heads=2")
    assert done.exit_code == 2 and "exists and is not empty" in done.stderr
    assert call("graft", llama_folder, tmp_path / "note.txt", "--to", "iha:pseudo_heads=2").exit_code == 2
    assert (tmp_path / "note.txt").read_text() == "mine"


def test_models_that_cannot_be_read(call, llama_folder, tmp_path):
    def line(source):
        done = call("graft", source, tmp_path / "out", "--to", "iha:pseudo_heads=2")
        assert done.exit_code == 2 and not (tmp_path / "out").exists()
        return done.stderr

    assert "does not exist. Did you mean 'llama'?" in line(llama_folder.with_name("lama"))
    assert "but no .gguf" in line(llama_folder / "config.json")
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded" in line(tmp_path / "empty")
    (tmp_path / "broken.gguf").write_bytes(b"GGUF, but no more")
    assert "cannot be loaded" in line(tmp_path / "broken.gguf")


def test_generation_is_for_causal_models(call, tmp_path):
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    BertModel(BertConfig(vocab_size=20, **sizes)).save_pretrained(tmp_path / "bert")
    make_tokenizer("bytes").save_pretrained(tmp_path / "bert")
    done = call("generate", tmp_path / "bert", "--prompt", "a")
    assert done.exit_code == 2 and "no causal language model" in done.stderr


def test_a_refusal_speaks_of_the_commands_own_options(call, llama_folder, tmp_path):
    """What raises it knows no command line and says allow_change=True."""
    done = call("graft", llama_folder, tmp_path / "out", "--to", "diff")
    assert done.exit_code == 2
    assert "pass --allow-change" in done.stderr and "allow_change" not in done.stderr


def test_iha_takes_two_pseudo_heads_where_none_are_given_and_says_so(call, llama_folder, tmp_path):
    done = call("graft", llama_folder, tmp_path / "out", "--to", "iha", "--json")
    assert json.loads(done.stdout)["layers"][0]["config"]["pseudo_heads"] == 2
    assert "iha runs with pseudo_heads=2: the comparison's default" in done.stderr
