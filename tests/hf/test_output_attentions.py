"""`output_attentions`: the weights (B, heads, T, S) by which a layer sums its values, where it has them."""

import pytest
import torch

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.hf import graft
from headloom.mechanism import mechanisms

TINY = {name: info.cls(info.config_cls.tiny()).double() for name, info in mechanisms().items()}
WEIGHTED = [name for name, attention in TINY.items() if not attention.without_weights]


def test_who_has_weights():
    assert set(TINY) - set(WEIGHTED) == {"iha", "simplicial"}
    assert "9 of them for every two tokens" in TINY["iha"].without_weights  # three pseudo-heads


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("cached", [False, True])
def test_the_output_is_computed_from_them(name, cached):
    """Equal to the call without weights, forward and backward; as `maps` draws them; rows sum to what it says."""
    attention = TINY[name]
    x = torch.randn(2, 6, attention.config.hidden_size, dtype=torch.float64)
    real = torch.tensor([[False] + [True] * 5, [True] * 6])
    calls = [{"padding": real} for _ in range(2)]
    if cached:
        if attention.constant_slots():
            return  # its past is a sum, which has no weights
        calls = [{"cache": hl.Cache()} for _ in range(2)]
        for call in calls:
            attention(x[:, :4], **call)
        x = x[:, 4:]
    one, other = (x.clone().requires_grad_() for _ in range(2))
    wanted = attention(one, **calls[0])
    got, weights = attention.forward_with_weights(other, **calls[1])
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    weights.retain_grad()
    for out in (wanted, got):
        out.square().sum().backward()
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-7, atol=1e-9)
    assert weights.grad is not None and weights.grad.abs().max() > 0
    assert weights.shape[0] == 2 and weights.shape[2:] == (x.shape[1], 6)
    if not cached:
        torch.testing.assert_close(weights, attention.maps(x, **calls[0]).patterns)
        sums = attention.row_sums()
        wanted_sums = torch.ones(weights.shape[1], dtype=x.dtype) if sums is None else sums
        seen = weights[1].sum(-1)
        torch.testing.assert_close(seen, wanted_sums[:, None].expand_as(seen), rtol=0, atol=1e-9 + attention.row_slack)
        assert not weights[0, :, 0].any()


def test_a_mechanism_without_weights_says_why():
    x = torch.randn(1, 3, TINY["simplicial"].config.hidden_size, dtype=torch.float64)
    with pytest.raises(HeadloomError, match=r"no attention weights .* a query weighs pairs of tokens"):
        TINY["simplicial"].forward_with_weights(x)


@pytest.mark.parametrize("layers", [None, 1])
def test_as_transformers_gives_them(llama, ids, layers):
    """All layers, grafted or not, as the original's eager attention; also with a cache, from the base model, under the
    config's switch and in generate."""
    model, x = llama(dtype=torch.float32), ids(2, 7)  # eager attention gives NaN for padding in float64
    model.set_attn_implementation("eager")
    mask = torch.ones_like(x)
    mask[0, :2] = 0
    wanted = model(x, attention_mask=mask, output_attentions=True).attentions
    model = graft(model, "talking_heads", layers=layers)
    calls = [lambda: model(x, attention_mask=mask, output_attentions=True)]
    calls.append(lambda: model.model(x, attention_mask=mask, output_attentions=True))
    real = mask.bool()
    for call in calls:
        found = call().attentions
        assert len(found) == 3
        for got, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(got.transpose(1, 2)[real], expected.transpose(1, 2)[real], rtol=0, atol=1e-5)
    first = model(x[:, :4], output_attentions=True)
    then = model(x[:, 4:], cache=first.cache, output_attentions=True)
    whole = model(x, output_attentions=True).attentions
    for part, rest, all_of_it in zip(first.attentions, then.attentions, whole, strict=True):
        torch.testing.assert_close(part, all_of_it[:, :, :4, :4], rtol=0, atol=1e-5)
        torch.testing.assert_close(rest, all_of_it[:, :, 4:], rtol=0, atol=1e-5)
    made = model.generate(x, max_new_tokens=2, output_attentions=True, return_dict_in_generate=True, do_sample=False)
    assert [step[2].shape for step in made.attentions] == [(2, 4, 7, 7), (2, 4, 1, 8)]
    assert not model(x).get("attentions")


def test_every_family(family_weights):
    """In every family every layer's weights are collected, in order, and sum to 1."""
    for attentions in family_weights:
        assert len(attentions) == 3 and {a.shape for a in attentions} == {(2, 4, 6, 6)}
        for layer in attentions:
            torch.testing.assert_close(layer.sum(-1), torch.ones(2, 4, 6), rtol=0, atol=1e-5)
        assert (attentions[0] - attentions[1]).abs().max() > 1e-6


@pytest.fixture(params=[None, 1])
def family_weights(request):
    from published import default_config

    from headloom.hf.model.family import families

    found = []
    for name, family in families().items():
        heads = family.head_classes()
        config = default_config(name)
        model = heads["AutoModelForCausalLM" if family.causal(config) else "AutoModelForMaskedLM"](config).eval()
        if model._can_set_experts_implementation():
            model.set_experts_implementation("eager")
        model = graft(model, "talking_heads", layers=request.param)
        found.append(model(torch.randint(3, 37, (2, 6)), output_attentions=True).attentions)
    return found


def test_refusals(llama, ids):
    model, x = llama(), ids(1, 5)
    model = graft(model, "iha", pseudo_heads=2, layers=1)
    with pytest.raises(
        HeadloomError,
        match=r"layer 1's iha has no attention weights .*2 pseudo-heads give a head 4 of them.* hl\.maps",
    ):
        model(x, output_attentions=True)
    with pytest.raises(HeadloomError, match="output_attentions=True cannot be served"):
        model.model(x, output_attentions=True)  # the base model too, which would give none without a word
    other = llama()
    other = graft(other, "talking_heads", layers=1)
    other.set_attn_implementation("sdpa")
    with pytest.raises(HeadloomError, match=r"'sdpa' the layers that were not grafted give no"):
        other(x, output_attentions=True)


def test_in_a_checkpointed_training_step(llama, ids):
    model, x = llama(), ids(2, 5)
    model = graft(model, "sas", simulated_heads=8)
    model.train().activation_checkpointing_enable()
    found = model(x, labels=x, output_attentions=True)
    assert {a.shape for a in found.attentions} == {(2, 8, 5, 5)}, "sas' heads are the simulated ones"
    found.loss.backward()
    assert len(found.attentions) == 3
