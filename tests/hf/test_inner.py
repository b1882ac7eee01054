"""The model inside a grafted head is a graft by itself: called, saved, built from its config, taken back by a fold."""

import copy
import pickle

import pytest
import torch
from transformers import AutoModel

import headloom as hl
from headloom.core.errors import HeadloomError
from headloom.hf import graft


@pytest.fixture(params=["grafted", "built", "loaded"])
def model(request, llama, tmp_path):
    """However a graft comes about."""
    made = llama()
    made = graft(made, "iha", pseudo_heads=2)
    if request.param == "built":
        return type(made)(made.config).double().eval()
    if request.param == "loaded":
        made.save_pretrained(tmp_path)
        return type(made).from_pretrained(tmp_path)
    return made


def test_it_is_of_the_grafts_class(model, ids, tmp_path):
    inner, x = model.model, ids(2, 6)
    assert type(inner).__name__ == "HeadloomLlamaModel" and inner.grafted() == model.grafted()
    fresh = type(inner)(model.config)
    assert list(fresh.state_dict()) == list(inner.state_dict()) and len(fresh.grafted()) == 3
    wanted = inner(x).last_hidden_state
    inner.save_pretrained(tmp_path / "inner")
    for other in (
        AutoModel.from_pretrained(tmp_path / "inner"),
        copy.deepcopy(inner),
        pickle.loads(pickle.dumps(inner)),
    ):
        assert type(other) is type(inner)
        torch.testing.assert_close(other(x).last_hidden_state, wanted, rtol=0, atol=1e-12)
    back, info = type(model).from_pretrained(tmp_path / "inner", output_loading_info=True)
    assert not any("self_attn" in name for name in info["missing_keys"]), "a head around it takes its mixes"
    torch.testing.assert_close(back.model(x).last_hidden_state, wanted, rtol=0, atol=1e-12)


def test_it_reads_packed_documents(model, ids):
    x, places = ids(1, 7), torch.tensor([[0, 1, 2, 3, 0, 1, 2]])
    rows = [model.model(part).last_hidden_state for part in (x[:, :4], x[:, 4:])]
    packed = model.model(x, position_ids=places, use_cache=False).last_hidden_state
    torch.testing.assert_close(packed, torch.cat(rows, 1), rtol=0, atol=1e-9)
    out = model.model(x, documents=places.new_tensor([[0, 0, 0, 0, 1, 1, 1]]), position_ids=places)
    with pytest.raises(HeadloomError, match="packed documents cannot be continued"):
        model.model(x[:, :1], cache=out.cache)


def test_it_goes_back(llama, ids):
    model, x = llama(), ids(1, 5)
    own, wanted = type(model.model), model(x).logits
    with pytest.raises(HeadloomError):
        graft(model, "iha", pseudo_heads=2, init="normal")
    assert type(model.model) is own
    model = graft(model, "gqa")
    with pytest.raises(HeadloomError, match="already grafted"):
        graft(model.model, "gqa")
    model = hl.fold(model)
    assert type(model.model) is own and torch.equal(model(x).logits, wanted)
    assert model(x, output_hidden_states=True).hidden_states[3].shape == (1, 5, 24)
