"""A Hugging Face config of every decoder family as the backbone of a model that is built around an attention."""

import json

import pytest
import torch
from published import published_config
from transformers import AutoModelForCausalLM, DynamicCache

from headloom.core.errors import HeadloomError
from headloom.costs.count import model_flops
from headloom.hf import build_around, fold
from headloom.hf.grafting.backbone import attention_facts, read_backbone, sized, sizes_of
from headloom.hf.model.config import config_class
from headloom.hf.model.family import Encoder, attentions, families

DECODERS = [name for name, family in families().items() if not isinstance(family, Encoder)]
ENCODERS = [name for name in families() if name not in DECODERS]
VOCABULARY, CONTEXT = 37, 16


@pytest.fixture(params=DECODERS)
def name(request):
    return request.param


@pytest.fixture
def config(name):
    """As published, only smaller."""
    return published_config(name)


@pytest.fixture
def backbone(config, tmp_path):
    config.save_pretrained(tmp_path / "config")
    return read_backbone(tmp_path / "config")


@pytest.fixture
def around(backbone):
    """around(specs, **sizes): the config's model with another attention."""

    def make(specs, **given):
        return build_around(specs, backbone, **{"vocab_size": VOCABULARY, "tokens": CONTEXT, **given})

    return make


def plain(family, config):
    """What the family's own attention is called."""
    facts = family.common(config, 0)
    return "mha" if facts["num_kv_heads"] == facts["num_heads"] else "gqa"


@torch.no_grad()
def take_weights(family, ours, theirs):
    """Give ours the weights of the family's own model; of its attention, part by part."""
    own = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        if name in own:
            parameter.copy_(own[name])
    for mine, other in zip(attentions(family, ours), attentions(family, theirs), strict=True):
        for letter, (weight, bias) in family.layout.weights(other, mine.config.num_kv_heads).items():
            linear = getattr(mine, f"{letter}_proj")
            linear.weight.copy_(weight)
            assert (linear.bias is None) == (bias is None)
            if bias is not None:
                linear.bias.copy_(bias)


def test_with_the_familys_own_attention_it_is_the_familys_model(family, config, around, base, near):
    """As published: norms, feed-forward, embeddings, positions, windows, scales and soft-caps are all the config's."""
    original = base(published=True)
    ours = around(plain(family, config)).double().eval()
    if ours._can_set_experts_implementation():
        ours.set_experts_implementation("eager")
    take_weights(family, ours, original)
    ids = torch.randint(3, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        near(ours(ids).logits, original(ids).logits)
    assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in original.parameters())


def test_it_starts_as_the_family_does(family, config, around, backbone):
    """Every tensor is as spread as the family's: a GPT-2's output projections shrink with the depth, too."""
    wide = {"hidden_size": 96, "intermediate_size": 61, "head_dim": 24}
    ours = around(plain(family, config), **wide)
    fields = {**sized(backbone, **wide), "vocab_size": VOCABULARY, "pad_token_id": None}
    torch.manual_seed(0)
    theirs = family.head_classes()["AutoModelForCausalLM"](config_class(family.name).from_dict(fields))
    pairs = [(p, dict(theirs.named_parameters()).get(name)) for name, p in ours.named_parameters() if p.ndim > 1]
    pairs = [pair for pair in pairs if pair[1] is not None]
    for mine, other in zip(attentions(family, ours), attentions(family, theirs), strict=True):
        weights = family.layout.weights(other, mine.config.num_kv_heads)
        pairs += [(getattr(mine, f"{letter}_proj").weight, weight) for letter, (weight, _) in weights.items()]
    for mine, other in pairs:
        assert float(mine.detach().std()) == pytest.approx(float(other.detach().std()), rel=0.1)


def test_variants_share_all_but_the_attention(family, around):
    """Parameters of equal name and shape start equal, whatever the mechanism and the feed-forward's width."""
    first = dict(around("mha").named_parameters())
    for other in (around(("iha", {"pseudo_heads": 2}), intermediate_size=30), around("sas"), around("mla")):
        made = dict(other.named_parameters())
        same = [n for n in made if n in first and made[n].shape == first[n].shape]
        assert all(torch.equal(made[n], first[n]) for n in same)
        assert any("embed" in n or "wte" in n for n in same) and any("o_proj" in n for n in same)
        beside = [n for n in set(first) ^ set(made) if not any(part in n for part in ("attn", "attention"))]
        assert not beside


def test_it_trains_saves_and_comes_back(family, config, around, tmp_path):
    for specs in (("iha", {"pseudo_heads": 2}), "gqa", "mla"):
        model = around(specs).eval()
        ids = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
        out = model(ids, labels=ids)
        out.loss.backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        model.save_pretrained(tmp_path / str(specs[0]))
        back = AutoModelForCausalLM.from_pretrained(tmp_path / str(specs[0]))
        with torch.no_grad():
            torch.testing.assert_close(back(ids).logits, out.logits, rtol=0, atol=1e-5)
        settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
        cached = back.generate(ids[:1], **settings)
        assert torch.equal(cached, back.generate(ids[:1], use_cache=False, **settings))


def test_flops_are_counted_without_memory(around, config):
    wide, narrow = (model_flops(around("mha", device="meta", intermediate_size=F), CONTEXT) for F in (40, 30))
    assert wide > narrow > 0


def test_another_depth_and_another_width(name, family, backbone, around):
    before = sizes_of(backbone)
    heads, K = 2 * before["num_heads"], before["head_dim"]
    deeper = around("mha", num_layers=5, num_heads=heads, hidden_size=2 * before["hidden_size"], head_dim=K)
    assert sizes_of(json.loads(deeper.config.to_json_string(use_diff=False)) | {"model_type": name}) == {
        **before,
        "num_layers": 5,
        "num_heads": heads,
        "hidden_size": 2 * before["hidden_size"],
    }
    before, after = attention_facts(backbone), attention_facts(backbone, num_layers=5)
    assert after[:3] == before
    windows = [fact.get("window") for fact in after]
    assert windows[3] in windows[:3]
    group = before[0]["num_heads"] // before[0]["num_kv_heads"]
    assert attentions(family, around(plain(family, deeper.config), num_layers=5))[4].config.group == group


@pytest.mark.parametrize("name", ["mistral", "gemma3_text"], indirect=True)
def test_a_wider_window_than_the_configs_is_kept_while_generating(around):
    """transformers' cache drops what lies behind the config's window; the variant's is the last word."""
    model = around(("gqa", {"window": None, "num_kv_heads": 1})).eval()
    ids = torch.randint(3, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(ids[:, :-1], cache=cache)
        last = model(ids[:, -1:], cache=cache).logits[:, -1]
        torch.testing.assert_close(last, model(ids, use_cache=False).logits[:, -1], rtol=0, atol=1e-5)
        swapped = torch.cat((ids[:, 1:2], ids[:, :1], ids[:, 2:]), 1)
        assert (model(swapped).logits[:, -1] - last).abs().max() > 1e-4, "the first tokens are seen"


@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "qwen2"], indirect=True)
def test_what_plain_weights_can_say_folds_into_an_ordinary_model(around, family):
    model = around(("iha", {"pseudo_heads": 1, "collapse": "mean"})).double().eval()
    with torch.no_grad():
        for attention in attentions(family, model):
            attention.q_mix.weight.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.randint(3, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(1))
    expected = model(ids).logits
    model = fold(model)
    assert type(model) is family.head_classes()["AutoModelForCausalLM"]
    torch.testing.assert_close(model(ids).logits, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ENCODERS)
def test_encoders_are_refused_wherever_a_config_is_given(name):
    values = json.loads(published_config(name).to_json_string(use_diff=False))
    with pytest.raises(HeadloomError, match=f"^the backbone is the config of a '{name}' model, an encoder, and mod"):
        build_around("mha", values, vocab_size=VOCABULARY, tokens=CONTEXT)


@pytest.mark.parametrize("name", ["gpt2"], indirect=True)
def test_what_the_attention_gives_is_dropped_as_published(around, family):
    attention = attentions(family, around(("gqa", {"dropout": 0.0})))[0].train()
    torch.manual_seed(0)
    out = attention(torch.randn(8, 50, 24))[0]
    assert float((out == 0).float().mean()) == pytest.approx(0.1, abs=0.02)  # of 9,600
    assert not (attention.eval()(torch.randn(1, 50, 24))[0] == 0).any()
