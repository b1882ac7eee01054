"""What is particular to a family: how it rounds its rotation, its switches, windows, dropout and initial masks."""

import copy
import importlib

import pytest
import torch

from headloom.core.errors import HeadloomError
from headloom.hf import graft

IHA = {"name": "iha", "pseudo_heads": 2}


def hidden(model, x, **kwargs):
    with torch.no_grad():
        return model.base_model(x, **kwargs).last_hidden_state


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rotation_is_rounded_as_the_familys(base, family, dtype):
    """Bit for bit what the family's own tables and product give, in every layer."""
    model = base(dtype=torch.float32)
    rotary = copy.deepcopy(getattr(model.base_model, "rotary_emb", None))  # its frequencies stay float32, as loaded
    model = graft(model, **IHA)
    model = model.to(dtype)
    attentions = model.grafted()
    if rotary is None:
        assert all(attention.rotary is None for attention in attentions)
        return
    modelling = importlib.import_module(family.attention_class().__module__)
    positions = torch.arange(3, 50)[None]
    x = torch.randn(1, 4, 47, attentions[0].config.head_dim, dtype=dtype)
    for index, attention in enumerate(attentions):
        kinds = getattr(model.config, "layer_types", None)
        own = (kinds[index],) if hasattr(rotary, "layer_types") else ()
        cos, sin = rotary(torch.zeros(1, dtype=dtype), positions, *own)
        wanted = modelling.apply_rotary_pos_emb(x, x, cos, sin)[0]
        assert torch.equal(attention.turn(x, positions, None), wanted)


KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOWED = {"use_sliding_window": True, "sliding_window": 5, "layer_types": KINDS, "num_key_value_heads": 2}
ROPES = {
    "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 300.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
PART = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}
SWITCHES = {
    "llama": [{"attention_bias": True, "head_dim": 10, "num_key_value_heads": 2}],
    "mistral": [{"head_dim": 10}],
    "mixtral": [{"sliding_window": 5, "head_dim": 10}],
    "qwen2": [WINDOWED],
    "gpt2": [
        {"scale_attn_by_inverse_layer_idx": True},
        {"scale_attn_weights": False},
        {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False},
    ],
    "gpt_neox": [{"use_parallel_residual": False}, {"attention_bias": False}, {"rope_parameters": PART}],
    "gemma2": [{"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7}],
    "gemma3_text": [
        {"use_bidirectional_attention": True, "sliding_window": 8},
        {"attn_logit_softcapping": 3.0},
        {"rope_parameters": ROPES, "query_pre_attn_scalar": 7},
    ],
    "modernbert": [
        {"local_attention": 2},
        {"classifier_pooling": "mean"},
        {"attention_bias": True, "layer_types": KINDS, "rope_parameters": ROPES},
    ],
    "qwen3": [{"attention_bias": True}, WINDOWED],
    "olmo2": [
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}},
        {"num_key_value_heads": 2, "attention_bias": True},
    ],
    "bert": [{"layer_norm_eps": 1e-3}],
}


@pytest.mark.parametrize(("switched", "number"), [(name, i) for name in SWITCHES for i in range(len(SWITCHES[name]))])
@pytest.mark.parametrize("layers", [None, 1])
def test_switches(model_of, switched, number, layers):
    model = model_of(switched, dtype=torch.float32, **SWITCHES[switched][number])
    x = torch.randint(3, 37, (2, 13))
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[1, 9:] = 0
    before = hidden(model, x, attention_mask=mask)[mask.bool()]
    grafted = graft(model, **IHA, layers=layers)
    assert grafted.graft_report.exact
    after = hidden(grafted, x, attention_mask=mask)[mask.bool()]
    assert (after - before).abs().max() < 2e-4 * (before.max() - before.min())


WINDOWS = {
    "mistral": [5, 5, 5],
    "gemma2": [5, None, 5],
    "gemma3_text": [5, None, 5],
    "modernbert": [None, 5, 5],  # |q - k| <= local_attention / 2 = 4
}
THETAS = {
    "mixtral": [1e6] * 3,
    "gemma3_text": [1e4, 1e6, 1e4],
    "modernbert": [16e4, 1e4, 1e4],
    "gpt2": [None] * 3,
    "bert": [None] * 3,
    "roberta": [None] * 3,
}
BIASED = {"gpt2", "gpt_neox", "bert", "roberta"}


def test_fields(base, name):
    model = base()
    model = graft(model, **IHA)
    configs = [attention.config for attention in model.grafted()]
    assert [c.window for c in configs] == WINDOWS.get(name, [None] * 3)
    assert {c.causal for c in configs} == {name not in ("bert", "roberta", "modernbert")}
    assert {c.softcap for c in configs} == {50.0 if name == "gemma2" else None}
    assert {c.scale for c in configs} == {10**-0.5 if name in ("gemma2", "gemma3_text") else None}
    assert [c.rope_theta for c in configs] == THETAS.get(name, [1e4] * 3)
    rotary = {"gpt_neox": 2, "gpt2": None, "bert": None, "roberta": None}  # a quarter of eight features
    assert {c.rotary_dim for c in configs} == {rotary.get(name, configs[0].head_dim)}
    biases = (True, False) if name == "qwen2" else (name in BIASED,) * 2
    assert {(c.qkv_bias, c.out_bias) for c in configs} == {biases}


@pytest.mark.parametrize(
    ("switched", "changes", "found"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, {"scale": [6**-0.5, 6**-0.5 / 2, 6**-0.5 / 3]}),
        ("gpt2", {"scale_attn_weights": False}, {"scale": [1.0, 1.0, 1.0]}),
        ("qwen2", WINDOWED, {"window": [5, None, 5]}),
        ("qwen3", WINDOWED, {"window": [5, None, 5]}),
        ("llama", {"attention_bias": True, "head_dim": 10}, {"out_bias": [True] * 3, "head_dim": [10] * 3}),
        ("mixtral", {"sliding_window": 5}, {"window": [5] * 3}),
        ("gemma2", {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7}, {"scale": [7**-0.5] * 3}),
    ],
)
def test_fields_that_switches_set(model_of, switched, changes, found):
    model = model_of(switched, **changes)
    model = graft(model, **IHA)
    for field, values in found.items():
        assert [getattr(attention.config, field) for attention in model.grafted()] == values


@pytest.mark.parametrize(
    ("dropping", "changes"),
    [
        ("gpt2", {"attn_pdrop": 0.5}),
        ("gpt2", {"resid_pdrop": 0.5}),
        ("gpt_neox", {"attention_dropout": 0.5}),
        ("bert", {"attention_probs_dropout_prob": 0.5}),
        ("modernbert", {"attention_dropout": 0.5}),
        ("gemma3_text", {"attention_dropout": 0.5}),
    ],
)
def test_dropout_is_kept(model_of, still, dropping, changes):
    """On the weights, and on the output where it stands inside the attention: in training only."""
    model = model_of(dropping, dtype=torch.float32, **{**still(dropping), **changes})
    model = graft(model, **IHA)
    attention = model.grafted()[0]
    x = torch.randn(1, 6, attention.config.hidden_size)
    with torch.no_grad():
        assert torch.equal(attention(x)[0], attention(x)[0])
        attention.train()
        assert not torch.equal(attention(x)[0], attention(x)[0])
        attention.config = attention.config.replace(dropout=0.0)
        out = attention(x)[0]
    dropped = changes.get("resid_pdrop", 0) or dropping == "modernbert"
    assert bool((out == 0).any()) == bool(dropped)


def test_positions_reach_modernbert(model_of):
    """Its layers are not told where tokens stand; a graft turns them by it all the same."""
    model = model_of("modernbert")
    x, places = torch.randint(3, 37, (1, 9)), torch.arange(9)[None] * 3
    before = model(x, position_ids=places).logits
    assert (model(x).logits - before).abs().max() > 1e-2
    model = graft(model, **IHA)
    torch.testing.assert_close(model(x, position_ids=places).logits, before, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("refusing", "head", "changes", "message"),
    [
        ("bert", "AutoModelForCausalLM", {"is_decoder": True}, "bert model with is_decoder=True cannot be grafted"),
        (
            "roberta",
            "AutoModel",
            {"is_decoder": True, "add_cross_attention": True},
            "roberta model with is_decoder=True",
        ),
        (
            "bert",
            "AutoModel",
            {"published": True, "position_embedding_type": "relative_key"},
            "position_embedding_type='relative_key'",
        ),
        ("gpt2", "AutoModel", {"add_cross_attention": True}, "gpt2 model with add_cross_attention=True"),
        ("gpt2", "AutoModel", {"reorder_and_upcast_attn": True}, "gpt2 model with reorder_and_upcast_attn=True"),
        ("gemma2", "AutoModel", {"use_bidirectional_attention": True}, "whether it is causal depends"),
    ],
)
def test_what_a_family_cannot(model_of, refusing, head, changes, message):
    model = model_of(refusing, head, **changes)
    cls, modules = type(model), list(model.modules())
    with pytest.raises(HeadloomError, match=message):
        graft(model, **IHA)
    assert type(model) is cls and all(a is b for a, b in zip(model.modules(), modules, strict=True))


def test_multimodal_gemma_is_named():
    from headloom.hf.model.family import family_named

    with pytest.raises(
        HeadloomError, match=r"type 'gemma3' cannot be grafted: image tokens .* 'gemma3_text' checkpoint"
    ):
        family_named("gemma3")
