"""A tiny model of every registered family, with random weights that make attention matter."""

import copy
import functools

import pytest
import torch
from published import default_config, published_config
from torch import nn
from transformers.pytorch_utils import Conv1D

from headloom.hf.model.classes import grafted_class
from headloom.hf.model.family import families
from headloom.mechanism import make_config

FLAT = {"bert", "roberta", "modernbert"}  # encoders
DROPOUTS = {"resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob", "attention_probs_dropout_prob"}


def stir(model, seed=0):
    """Random values everywhere: norms about one, rows of matrices of about unit length, biases small."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                if isinstance(module, nn.Embedding):
                    parameter.copy_(noise)
                elif parameter.ndim < 2:
                    parameter.copy_(1 + 0.1 * noise if name == "weight" else 0.1 * noise)
                else:
                    parameter.copy_(noise * 1.5 * parameter.shape[0 if isinstance(module, Conv1D) else -1] ** -0.5)
    return model


def build(name, head=None, published=False, **changes):
    """The family's default config, or a published checkpoint's, with small sizes; `changes` are of declared fields."""
    family = families()[name]
    config = (published_config if published else default_config)(name, **changes)
    heads = family.head_classes()
    cls = heads[head] if head else heads.get("AutoModelForMaskedLM", heads.get("AutoModelForCausalLM"))
    model = cls(config).double()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the fast product of experts takes no float64
    return stir(model).eval()


usual = functools.cache(build)


@pytest.fixture
def model_of():
    """model_of(name, head, dtype=..., **changes): a family's own model with its token logits, or with that head."""

    def make(name, head=None, *, dtype=torch.float64, **changes):
        model = build(name, head, **changes) if changes else copy.deepcopy(usual(name, head))
        return model.to(dtype)

    return make


@pytest.fixture(params=list(families()))
def name(request):
    """Every registered family; one without a shape here fails."""
    return request.param


@pytest.fixture
def family(name):
    return families()[name]


@pytest.fixture
def encoder(name):
    return name in FLAT


@pytest.fixture
def base(name, model_of):
    """base(head, dtype=..., **changes): `model_of` this family."""
    return functools.partial(model_of, name)


@pytest.fixture
def still():
    """still(name): a family's dropouts, switched off: for what is trained and compared."""
    return lambda name: dict.fromkeys(DROPOUTS & set(families()[name].config_class().__dataclass_fields__), 0.0)


@pytest.fixture
def slack(name):
    """Of logits in float64, over their range: two families compute in float32 there."""
    return {"gemma2": 1e-6, "modernbert": 1e-6}.get(name, 1e-9)


@pytest.fixture
def plain(family, base):
    """The mechanism that is the family's own attention: (name, options)."""
    config = base().config
    shared = family.common(config, 0)
    grouped = shared["num_kv_heads"] != shared["num_heads"]
    chosen = "gqa" if grouped else "mha"
    assert make_config(chosen, **shared).exact
    return chosen, {}


@pytest.fixture
def graft_class(base):
    """graft_class(): the class that a graft of the family's model has."""
    return lambda: grafted_class(base())


@pytest.fixture
def batch(encoder):
    """Token ids (2, 13) and a mask that pads the first row on the family's side by 5."""
    ids = torch.randint(3, 37, (2, 13), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, slice(-5, None) if encoder else slice(0, 5)] = 0
    return ids, mask


@pytest.fixture
def near(slack):
    """near(got, wanted): equal within rounding, measured over the range of what is wanted."""

    def check(got, wanted, allowed=slack):
        spread = float(wanted.max() - wanted.min())
        assert spread > 0.5, "a model that says the same everywhere shows nothing"
        difference = float((got.double() - wanted.double()).abs().max())
        assert difference <= allowed * spread, f"{difference:.1e} of {spread:.1e}"

    return check
