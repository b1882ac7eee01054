"""One's own model as what all variants share: sizes, a Hugging Face config, where and in what it trains."""

import json
import shlex

import pytest
import torch
from published import published_config
from transformers import BertConfig, LlamaConfig, LlamaForCausalLM

from headloom.core.errors import HeadloomError
from headloom.hf.grafting.backbone import read_backbone
from headloom.lab.compare import compare_command, comparison_study
from headloom.lab.plan import layers
from headloom.lab.plan.layers import meta_model, run_config
from headloom.lab.spec.resolve import resolve_study
from headloom.lab.spec.resolved import StudySpec
from headloom.lab.study import Study
from headloom.train.config import RunConfig
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
    common = {"seeds": 1, "data": "stdlib", "tokenizer": "bytes", "threads": 1, **given}
    return resolve_study(comparison_study(variants, **common), kind="compare")


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
    assert (found - expected).abs().max() < 1e-9 * expected.abs().max()
    iha = meta_model(spec, spec.variants[1], spec.variants[1].shape, 61)
    assert iha.config.intermediate_size == 34 and iha.model.layers[2].self_attn.config.rope_scaling["factor"] == 4.0


def test_what_is_given_beside_a_config_wins(folder):
    """Another width takes the width of a head and the feed-forward with it."""
    shape = spec_of(config=str(folder / "config.json"), backbone={"layers": 5}).variants[0].shape
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.intermediate_size) == (5, 24, 10, 34)
    shape = spec_of(config=str(folder), backbone={"width": 48}).variants[0].shape
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.intermediate_size) == (3, 48, 24, 68)
    shape = spec_of(backbone={"layers": 3, "width": 48, "heads": 4}).variants[0].shape
    assert (shape.num_layers, shape.hidden_size, shape.num_heads, shape.head_dim) == (3, 48, 4, 12)


LLAMA = LlamaConfig(**FIELDS).to_dict()


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        (BertConfig(num_hidden_layers=2).to_dict(), ["a 'bert' model, an encoder", "predict the next token", "gpt2"]),
        ({"model_type": "mamba", "hidden_size": 8}, ["a 'mamba' model, which is not built here", "gpt2"]),
        ({"model_type": "gemma3", "text_config": {}}, ["a 'gemma3' model", "text model alone"]),
        ({"model_type": "headloom", "family": "llama"}, ["a graft: give that of the model it was made from"]),
        ({**LLAMA, "auto_map": {"AutoConfig": "configuration_x.X"}}, ["code of its own (auto_map)", "a copy"]),
        ({**LLAMA, "quantization_config": {"bits": 4}}, ["a quantized model", "a copy"]),
        ({**LLAMA, "hidden_size": "x"}, ["not a config that transformers reads", "hidden_size"]),
        ({"hidden_size": 3}, ["holds no Hugging Face config", "model_type"]),
        (None, ["holds no Hugging Face config", "does not exist"]),
    ],
)
def test_a_config_that_is_not_built_here_is_refused(values, parts, tmp_path):
    path = tmp_path / "config.json"
    if values is not None:
        path.write_text(json.dumps(values, default=str))
    with pytest.raises(HeadloomError) as caught:
        spec_of(config=str(path))
    assert all(part in str(caught.value) for part in parts) and "\n" not in str(caught.value)


@pytest.fixture
def published(tmp_path):
    """published(name, **changes): a small config.json of that family, as one of its checkpoints has it."""

    def write(name, **changes):
        published_config(name, **changes).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    return write


def test_the_configs_own_attention_is_what_variants_are_given(published):
    """gqa has the config's key/value heads, mha by its name has as many as heads, and what a variant states wins."""
    from headloom.lab.plan.layers import layer_configs

    spec = spec_of("gqa,mha,iha,iha:num_kv_heads=1,mla", config=published("gemma2"), tokens=16)
    made = {v.label: [config for _, config in layer_configs(spec, v, v.shape)] for v in spec.variants}
    assert [each[0].num_kv_heads for each in made.values()] == [2, 4, 2, 1, 4]
    for each in made.values():
        assert [c.window for c in each] == [5, None, 5] and {c.softcap for c in each} == {50.0}
    spec = spec_of("gqa,mha", config=published("gpt2"), tokens=16)
    gqa, mha = ([config for _, config in layer_configs(spec, v, v.shape)] for v in spec.variants)
    assert (gqa[0].num_kv_heads, mha[0].num_kv_heads) == (1, 4)
    assert all(c.qkv_bias and c.out_bias and c.dropout == 0.1 and c.rope_theta is None for c in (*gqa, *mha))
    spec = spec_of("gqa,mla", config=published("qwen3"), tokens=16)
    assert [layer_configs(spec, v, v.shape)[0][1].qk_norm for v in spec.variants] == ["head", None]


def test_sizes_given_beside_a_config_are_the_familys(published):
    """Its feed-forward's proportion, its way of naming, its limits."""
    shape = spec_of(config=published("gpt2"), backbone={"width": 48, "layers": 5}, tokens=16).variants[0].shape
    assert (shape.num_layers, shape.head_dim, shape.intermediate_size) == (5, 12, 4 * 48)
    spec = spec_of(config=published("gpt2"), backbone={"width": 48, "layers": 5}, tokens=16)
    config = meta_model(spec, spec.variants[0], shape, 61).config
    assert (config.n_embd, config.n_layer, config.n_inner, config.n_positions) == (48, 5, 192, 64)
    spec = spec_of(config=published("gpt2"), tokens=65)
    with pytest.raises(HeadloomError, match="mha: a context of 65 tokens is longer than the config's 64 learned posi"):
        layers.resolved_attention(spec, spec.variants[0])
    spec = spec_of("gqa,iha", config=published("mistral"), backbone={"heads": 3, "head_dim": 8}, tokens=16)
    with pytest.raises(HeadloomError, match=r"gqa: the config's 4 heads share 2 key/value heads, 2 a head: .*not 3"):
        layers.resolved_attention(spec, spec.variants[0])


@pytest.mark.parametrize("knob", ["F", "layers", "heads", "width"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "gemma3_text", "mixtral"])
def test_every_knob_turns_or_is_refused(name, knob, published):
    from headloom.lab.plan.plan import match_budgets

    config = published(name, **{"n_embd" if name == "gpt2" else "hidden_size": 32})
    study = Study(
        variants=["gqa", {"use": "iha", "knob": {"parameters": knob}}],
        budgets=[{"match": "parameters", "knob": "F", "tolerance": 0.9}],
        config=config,
        tokens=16,
        seeds=2,
        threads=1,
    )
    if knob == "heads" and name.startswith("gpt"):
        with pytest.raises(HeadloomError, match=f"the heads of a {name} model fill its width, so their number cannot"):
            resolve_study(study)
        return
    spec = resolve_study(study)
    iha = spec.variants[1]
    shapes, matches = match_budgets(spec, layers.Counts(spec, 61))
    counted = layers.count_parameters(spec, iha, shapes["iha"], 61)
    assert counted == matches["iha"][0].count
    bound = {"F": 0.02, "layers": 0.5, "heads": 0.3, "width": 0.5}[knob]
    assert abs(matches["iha"][0].relative) < bound


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral"])
def test_a_comparison_around_a_config(name, published, small, tmp_path):
    """From the config to the page's first lines: runs, records, manifest; and the same again makes no run anew."""
    from headloom.lab.compare import compare
    from headloom.records.reading import read_study
    from headloom.report.facts import in_short

    config = published(name, **{"n_inner" if name == "gpt2" else "intermediate_size": 150})
    given = {**small, "config": config, "seeds": 1, "batch_size": 32, "evaluations": 0, "out": tmp_path / "out"}
    found = compare("gqa,iha", **given)
    assert not found.failed and all(v["bits_per_byte"]["mean"] > 0 for v in found.results["variants"])
    config = json.loads((tmp_path / "out" / "runs" / "iha-seed0" / "config.json").read_text())
    assert config["backbone"]["model_type"] == name and "rope_theta" not in config
    assert config.pop("format") == 1
    run = RunConfig(**config)
    assert run.to_dict() == config and type(build(run).base_model).__name__.startswith("Headloom")
    assert f"{name} config, 3 layers, width 24, 4 heads" in dict(in_short(read_study(tmp_path / "out")))["Model"]
    stamp = (tmp_path / "out" / "runs" / "iha-seed0" / "result.json").stat().st_mtime_ns
    compare("gqa,iha", **given)
    assert (tmp_path / "out" / "runs" / "iha-seed0" / "result.json").stat().st_mtime_ns == stamp


def test_a_run_says_each_thing_once(published):
    values = {"name": "a", "specs": ["mha"], "steps": 1, "hidden_size": 24, "num_layers": 3, "num_heads": 4}
    with pytest.raises(HeadloomError, match="rope_theta came beside a backbone, which says that itself"):
        RunConfig(**values, intermediate_size=96, backbone=read_backbone(published("gpt2")), rope_theta=1e4)


def test_the_command_and_the_runs_say_it_all(folder):
    spec = spec_of(config=str(folder), backbone={"heads": 4, "width": 48}, device="cpu", dtype="bfloat16")
    words = shlex.split(compare_command(spec))
    said = dict(zip(words[2::2], words[3::2], strict=True))
    assert said["--config"] == str(folder) and said["--device"] == "cpu" and said["--dtype"] == "bfloat16"
    assert (said["--layers"], said["--width"], said["--heads"]) == ("3", "48", "4")
    run = run_config(spec, spec.variants[1], spec.variants[1].shape, 0)
    assert (run.device, run.dtype, run.backbone["rms_norm_eps"]) == ("cpu", "bfloat16", 1e-2)
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
