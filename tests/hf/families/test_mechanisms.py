"""What a caller states is the last word with every mechanism too: in grafts of every family, in models built here."""

import copy

import pytest
import torch
from transformers import StaticCache
from transformers.models.auto import modeling_auto

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.hf import graft

# two continuations (1, 2) and (3, 4) of token 0
TREE = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]).bool()
PLACES = torch.tensor([[0, 1, 2, 1, 2]])
STATE = {"linear"}  # of constant size: no static cache holds it
ANY_PROJECTIONS = {"diff", "iha", "sas", "simplicial", "talking_heads"}  # these stand on every family
SIZES = {
    "vocab_size": 37, "hidden_size": 24, "num_layers": 2, "num_heads": 4, "head_dim": 10, "intermediate_size": 29,
    "max_positions": 64, "rope_theta": 100.0,
}  # fmt: skip
X = torch.tensor([[5, 9, 17, 30, 11, 23, 8]])


def logits(model, x, **call):
    with torch.no_grad():
        return model(x, **call).logits


def stirred(model):
    """Mixes and all that a mechanism adds leave their start."""
    torch.manual_seed(0)
    with torch.no_grad():
        for attention in model.grafted():
            for parameter in attention.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def branches_are_apart(model, near, name):
    """Under a mask of two branches each token says what it says in its own branch alone."""
    causal = torch.ones(3, 3).bool().tril()[None, None]

    def call(places):
        if name == "modernbert":
            return {}  # takes no positions: the second branch is a text of its own
        return {"position_ids": places + 2 * (name == "roberta")}

    mask, second = TREE.clone(), [0, 3, 4]
    if name == "modernbert":
        mask[3:, 0], second = False, [3, 4]
    got = logits(model, X[:, :5], attention_mask=mask[None, None], **call(PLACES))
    one = logits(model, X[:, :3], attention_mask=causal, **call(PLACES[:, :3]))
    T = len(second)
    two = logits(model, X[:, second], attention_mask=causal[:, :, :T, :T], **call(PLACES[:, :T]))
    near(got, torch.cat((one, two[:, -2:]), 1), 1e-6)


def padding_is_no_restart(model, near, mechanism):
    """Four cached tokens, then [padding, x] at the positions [0, 4], then one more: as if there were no padding."""
    want = logits(model, X[:, [0, 1, 2, 3, 5, 6]])[:, 4:]
    real = torch.tensor([[1, 1, 1, 1, 0, 1, 1]])
    for static in (False, True):
        cache, outs = StaticCache(config=model.config, max_cache_len=12) if static else None, []
        if static and mechanism in STATE:
            with pytest.raises(HeadloomError, match="a state of constant size cannot be kept in a StaticLayer"):
                model(X[:, :4], cache=cache)
            continue
        with torch.no_grad():
            cache = model(X[:, :4], cache=cache, use_cache=True).cache
            for start, end, places in ((4, 6, [[0, 4]]), (6, 7, [[5]])):
                call = {"attention_mask": real[:, :end], "position_ids": torch.tensor(places), "cache": cache}
                outs.append(model(X[:, start:end], **call).logits[:, -1:])
        near(torch.cat(outs, 1), want, 1e-6)


def comes_back(model, auto, near, folder):
    """The same weights; constants are rounded to the type in which a model was made, as in test_folded.py."""
    model.save_pretrained(folder)
    back = getattr(modeling_auto, auto).from_pretrained(folder)
    assert type(back) is type(model)
    if back._can_set_experts_implementation():
        back.set_experts_implementation("eager")  # the fast product of experts takes no float64
    assert all(torch.equal(tensor, back.state_dict()[key]) for key, tensor in model.state_dict().items())
    near(logits(back, X[:, :5]), logits(model, X[:, :5]), 64 * torch.finfo(torch.float32).eps)


def test_grafts(base, name, encoder, plain, near, tmp_path):
    """A mechanism that needs other projections than the family has is refused; a padded window counts padding's places,
    so that what a family with one says is not what it would say without padding."""
    original, served = base(), set()
    windowed = getattr(original.config, "sliding_window", None)
    auto = "AutoModelForMaskedLM" if encoder else "AutoModelForCausalLM"
    for mechanism in hl.mechanisms():
        try:
            model = graft(copy.deepcopy(original), mechanism, allow_change=True)
        except HeadloomError:
            continue
        served.add(mechanism)
        branches_are_apart(stirred(model), near, name)
        if not encoder and not windowed:
            padding_is_no_restart(model, near, mechanism)
        comes_back(model, auto, near, tmp_path / mechanism)
    assert served >= {*ANY_PROJECTIONS, plain[0]} and ("deltaformer" in served) is not encoder


@pytest.mark.parametrize("name", ["llama"], indirect=True)
@pytest.mark.parametrize("mechanism", hl.mechanisms())
def test_built_models(name, mechanism, near, tmp_path):
    """Those mechanisms too that no family's projections fit."""
    model = stirred(hl.build_model((mechanism, {}), **SIZES).double())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim > 1 else 1)  # weights of a fresh model say the same everywhere
    branches_are_apart(model, near, name)
    padding_is_no_restart(model, near, mechanism)
    comes_back(model, "AutoModelForCausalLM", near, tmp_path)
