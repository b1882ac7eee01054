"""One's own model as what all variants share: sizes, a Hugging Face config, where and in what it trains."""

import json
import shlex

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig

from headloom.core.errors import HeadloomError
from headloom.lab.compare import compare_command, comparison_study
from headloom.lab.plan.layers import meta_model, run_config
from headloom.lab.spec.resolve import resolve
from headloom.lab.spec.resolved import StudySpec
from headloom.lab.spec.variants import parse_variants
from headloom.train.run import build

FIELDS = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "head_dim": 10,
    "intermediate_size": 34,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("config")
    LlamaConfig(**FIELDS).save_pretrained(path)
    return path


def spec_of(variants="mha,iha", **given):
    parsed = parse_variants(variants)
    common = {"seeds": 1, "data": "stdlib", "tokenizer": "bytes", "threads": 1, **given}
    return resolve(comparison_study(parsed, "tiny", **common), kind="compare", variants=parsed)


def test_a_config_is_the_backbone_of_every_variant(folder):
    """With the weights of transformers' own model of that config, ours computes the same: sizes, norms, rotary."""
    spec = spec_of(config=str(folder), tokens=16)
    assert [variant.shape for variant in spec.variants] == [spec.variants[0].shape] * 2
    assert StudySpec.model_validate_json(spec.model_dump_json()) == spec
    torch.manual_seed(0)
    original = LlamaForCausalLM(LlamaConfig(**FIELDS)).double().eval()
    run = run_config(spec, spec.variants[0], spec.variants[0].shape, 0).model_copy(update={"vocab_size": 61})
    ours = build(run).double().eval()
    ours.load_state_dict(original.state_dict(), strict=True)
    ids = torch.arange(16)[None] * 3 % 61
    with torch.no_grad():
        expected, found = original(ids).logits, ours(ids).logits
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()  # the original's cos and sin are float32
    iha = meta_model(spec, spec.variants[1], spec.variants[1].shape, 61)
    assert iha.config.intermediate_size == 34 and iha.model.layers[2].self_attn.config.rope_scaling["factor"] == 4.0


def test_what_is_given_beside_a_config_wins(folder):
    """Another width takes the width of a head and the feed-forward with it."""
    shape = spec_of(config=str(folder / "config.json"), backbone={"layers": 5}).variants[0].shape
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.intermediate_size) == (5, 24, 10, 34)
    shape = spec_of(config=str(folder), backbone={"width": 48}).variants[0].shape
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.intermediate_size) == (3, 48, 24, 128)
    shape = spec_of(backbone={"layers": 3, "width": 48, "heads": 4}).variants[0].shape
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.head_dim) == (3, 48, 4, 12)


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (MistralConfig(num_hidden_layers=2).to_dict(), ["the config of a mistral model", "llama config", "graft"]),
        ({**LlamaConfig(**FIELDS).to_dict(), "hidden_act": "gelu"}, ["hidden_act 'gelu'", "have 'silu'"]),
        ({**LlamaConfig(**FIELDS).to_dict(), "attention_bias": True}, ["attention_bias True", "qkv_bias=true"]),
        ({"hidden_size": 3}, ["holds no Hugging Face config"]),
        ({**LlamaConfig(**FIELDS).to_dict(), "hidden_size": "x"}, ["not a config that transformers reads"]),
    ],
)
def test_a_config_that_is_not_built_here_is_refused(values, parts, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(values, default=str))
    with pytest.raises(HeadloomError) as caught:
        spec_of(config=str(path))
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


def test_the_command_and_the_runs_say_it_all(folder):
    spec = spec_of(config=str(folder), backbone={"heads": 4, "width": 48}, device="cpu", dtype="bfloat16")
    words = shlex.split(compare_command(spec))
    said = dict(zip(words[2::2], words[3::2], strict=True))
    assert said["--config"] == str(folder) and said["--device"] == "cpu" and said["--dtype"] == "bfloat16"
    assert (said["--layers"], said["--width"], said["--heads"]) == ("3", "48", "4")
    run = run_config(spec, spec.variants[1], spec.variants[1].shape, 0)
    assert (run.device, run.dtype, run.norm_eps) == ("cpu", "bfloat16", 1e-2)
    assert compare_command(spec_of(compile="inductor")).endswith("--compile")
    assert "--layers" not in compare_command(spec_of())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here, so nothing is refused")
def test_cuda_where_there_is_none_is_refused_before_anything_is_trained(text_file):
    from headloom.lab.plan.plan import make_plan

    with pytest.raises(HeadloomError, match="'cuda' was asked for, but torch sees none"):
        make_plan(spec_of(device="cuda", data=str(text_file), tokens=16))


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"device": "gpu"}, "device: input should be 'auto', 'cpu' or 'cuda', not 'gpu'"),
        ({"dtype": "int8"}, "dtype: input should be 'float32' or 'bfloat16', not 'int8'"),
        ({"backbone": {"layers": 0}}, "layers: input should be greater than or equal to 1, not 0"),
    ],
)
def test_wrong_values_name_the_argument(given, part):
    with pytest.raises(HeadloomError) as caught:
        spec_of(**given)
    assert str(caught.value) == part
