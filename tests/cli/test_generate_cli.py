"""`headloom generate`: the text transformers' own generate gives, piece by piece."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headloom.hf import checkpoints, generation


def reference(folder, prompt, **settings):
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    out = model.generate(**ids, max_new_tokens=6, pad_token_id=257, **settings)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


@pytest.fixture(scope="module")
def grafted_folder(llama_folder, tmp_path_factory):
    import headloom

    found = checkpoints.load_checkpoint(llama_folder)
    found.model = headloom.graft(found.model, "iha", pseudo_heads=2)
    checkpoints.save_checkpoint(found, folder := tmp_path_factory.mktemp("grafts") / "iha")
    return folder


@pytest.mark.parametrize("arguments", [[], ["--cache", "static"], ["--beams", "3"]])
def test_the_new_text_goes_to_stdout(call, llama_folder, grafted_folder, arguments):
    settings = {"do_sample": False, "num_beams": 3 if "--beams" in arguments else 1}
    wanted = reference(llama_folder, "Once upon", **settings)
    assert wanted != reference(llama_folder, "Once upom", **settings), "the prompt decides"
    for folder in (llama_folder, grafted_folder):
        done = call("generate", folder, "--prompt", "Once upon", "--max-new-tokens", "6", *arguments)
        assert done.exit_code == 0, done.output
        assert done.stdout == wanted + "\n"


def test_sampling_follows_the_seed_alone(call, llama_folder):
    arguments = ["generate", llama_folder, "--prompt", "Once", "--max-new-tokens", "12", "--temperature", "3", "--json"]
    state = torch.random.get_rng_state()
    first, again, other = (json.loads(call(*arguments, "--seed", seed).stdout) for seed in (1, 1, 2))
    assert torch.equal(state, torch.random.get_rng_state()), "the caller's random state is his own"
    assert first["text"] == again["text"] != other["text"]
    assert first["prompt"] == "Once" and 1 <= first["tokens"] <= 12
    narrow = json.loads(call(*arguments[:-1], "--top-p", "0.000001", "--json").stdout)
    greedy = json.loads(call(*arguments[:6], "--json").stdout)
    assert narrow["text"] == greedy["text"], "of a tiny share only the likeliest token is left"


def test_pieces_come_as_they_are_made(llama_folder):
    pieces = []
    found = generation.generate(
        checkpoints.load_checkpoint(llama_folder), "a b", max_new_tokens=20, write=pieces.append
    )
    assert "".join(pieces) == found.text and len(pieces) > 2


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", ""], "the prompt holds no tokens"),
        (["--prompt", "a", "--max-new-tokens", "0"], "max_new_tokens must be above 0, not 0"),
        (["--prompt", "a", "--temperature", "0"], "temperature must be above 0, not 0.0"),
        (["--prompt", "a", "--top-p", "1.5"], "top_p must be above 0 and at most 1, not 1.5"),
        (["--prompt", "a", "--beams", "0"], "beams must be above 0, not 0"),
        (["--prompt", "a", "--cache", "statik"], "Did you mean 'static'?"),
    ],
)
def test_wrong_calls(call, llama_folder, arguments, part):
    done = call("generate", llama_folder, *arguments)
    assert done.exit_code == 2 and done.stdout == ""
    assert part in done.stderr


def test_a_checkpoint_without_tokenizer(call, llama_folder, tmp_path):
    found = checkpoints.load_checkpoint(llama_folder)
    found.tokenizer = None
    checkpoints.save_checkpoint(found, tmp_path / "bare")
    done = call("generate", tmp_path / "bare", "--prompt", "a")
    assert done.exit_code == 2 and "no tokenizer" in done.stderr
