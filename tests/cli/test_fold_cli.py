"""`headloom fold`: from a grafted folder to an ordinary one."""

import json

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import headloom  # noqa: F401  registers the folder's model type


def test_graft_and_fold(call, llama_folder, tmp_path):
    graft, out = tmp_path / "graft", tmp_path / "plain"
    assert call("graft", llama_folder, graft, "--to", "iha:pseudo_heads=1").exit_code == 0
    model = AutoModelForCausalLM.from_pretrained(graft)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_mix.weight.add_(0.5)
    model.save_pretrained(graft)
    done = call("fold", graft, out)
    assert done.exit_code == 0, done.output
    assert "2 layers folded into plain weights; 4 key/value heads instead of 2: the cache is 2 times" in done.stdout
    plain = AutoModelForCausalLM.from_pretrained(out)
    assert type(plain) is LlamaForCausalLM and json.loads((out / "config.json").read_text())["model_type"] == "llama"
    x = torch.arange(30)[None]
    wanted = model.eval()(x).logits
    assert (wanted - AutoModelForCausalLM.from_pretrained(llama_folder).eval()(x).logits).abs().max() > 0.1
    torch.testing.assert_close(plain.eval()(x).logits, wanted, rtol=1e-4, atol=1e-4)
    assert AutoTokenizer.from_pretrained(out)("a").input_ids == [97]
    again = json.loads(call("fold", graft, tmp_path / "again", "--json").stdout)
    assert (again["layers"], again["kv_heads"]) == ([0, 1], 4)


def test_what_cannot_be_folded(call, llama_folder, tmp_path):
    assert call("graft", llama_folder, tmp_path / "graft", "--to", "iha:pseudo_heads=2").exit_code == 0
    done = call("fold", tmp_path / "graft", tmp_path / "out")
    assert done.exit_code == 2 and "not foldable: q_mix, k_mix, v_mix, out_mix, because 2 pseudo-heads" in done.stderr
    done = call("fold", llama_folder, tmp_path / "out")
    assert done.exit_code == 2 and f"only a grafted model can be folded, and '{llama_folder}' is not one" in done.stderr
    assert not (tmp_path / "out").exists()
