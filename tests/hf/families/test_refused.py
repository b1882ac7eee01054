"""Bad input, for every family: a clear error, and the model exactly as it was."""

import pytest
import torch
from torch import nn

from headloom.core.errors import HeadloomError
from headloom.hf import build_model, graft


class Wrapped(nn.Module):
    """As an adapter wraps a projection."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, x):
        return self.inner(x)


def already(model, family):
    return graft(model, "talking_heads", layers=0)


def replaced(model, family):
    attention = family.attention_of(family.layers(model)[1])
    attention.__class__ = type("Flashy", (type(attention),), {})


def adapted(model, family):
    attention, name = family.attention_of(family.layers(model)[1]), family.layout.inputs[0]
    setattr(attention, name, Wrapped(getattr(attention, name)))


def subclassed(model, family):
    attention, name = family.attention_of(family.layers(model)[1]), family.layout.inputs[0]
    projection = getattr(attention, name)
    projection.__class__ = type("Quantised", (type(projection),), {})


def quantized(model, family):
    model.config.quantization_config = {"quant_method": "bitsandbytes"}


def broken(model, family):
    next(iter(family.layers(model)[0].parameters())).data.fill_(float("nan"))


def nothing(model, family):
    pass


IHA = {"name": "iha", "pseudo_heads": 2}
CASES = {
    "grafted": (already, IHA, "already grafted"),
    "replaced": (replaced, IHA, "layer 1's attention is a Flashy, not .*'s own"),
    "adapted": (adapted, IHA, "layer 1's .* is a Wrapped, not a plain (Linear|Conv1D): graft before adapters"),
    "subclassed": (subclassed, IHA, "layer 1's .* is a Quantised, not a plain"),
    "quantized": (quantized, IHA, "a quantized model cannot be grafted"),
    "range": (nothing, {**IHA, "layers": "0-3"}, "layer 3 does not exist: the model has 3 layers"),
    "sizes": (nothing, {"name": "sas", "simulated_heads": 6}, "simulated_heads must be a multiple of num_heads 4"),
    "base": (
        nothing,
        {"name": "mla", "allow_change": True},
        "layer 0: mla cannot stand|base 'mla' has as many|layer 0's q_proj .* does not fit|qk_norm needs",
    ),
    "kv": (nothing, {"name": "gqa", "num_kv_heads": 1, "allow_change": True}, "layer 0"),
    "window": (nothing, {**IHA, "window": 7}, "iha with window=7 does not start as"),
    "inexact": (nothing, {**IHA, "init": "normal"}, "init=normal does not start as"),
    "broken": (broken, IHA, "outputs|own logits on a probe batch are not finite"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_left_as_it_was(base, family, case, tree):
    spoil, arguments, message = CASES[case]
    model = base()
    model = spoil(model, family) or model
    family.layers(model)[2].train()
    before = tree(model)
    with pytest.raises(HeadloomError, match=message):
        graft(model, **arguments)
    assert tree(model) == before
    if case in ("range", "sizes", "base", "kv", "window", "inexact"):
        assert graft(model, **IHA).graft_report.exact


def test_a_change_that_is_found_late(base, monkeypatch, tree):
    """The graft was made before the difference was measured."""
    from headloom.mechanism import mechanisms

    model = base()
    before = tree(model)
    monkeypatch.setattr(mechanisms()["iha"].config_cls, "exact", True)
    with pytest.raises(HeadloomError, match="iha as given changes the model: logits differ by"):
        graft(model, **IHA, init="normal")
    assert tree(model) == before


def test_meta(family, base):
    with torch.device("meta"):
        model = type(base())(base().config)
    with pytest.raises(HeadloomError, match="meta device"):
        graft(model, **IHA)


def test_projections_that_a_family_lacks(base, name, family):
    """Where q, k, v and o are Linears of their own by our names, a mechanism may bring others; elsewhere it says so."""
    shared = family.common(base().config, 0)
    itself = "gqa" if shared["num_kv_heads"] < shared["num_heads"] else "mha"
    for arguments, problem in (
        ({"name": itself, "projection": "bit"}, "projection 'bit' needs separate projections"),
        ({"name": "sas", "simulated_heads": 8, "aggregate": "full"}, "wide together|o projection is"),
    ):
        model = base()
        if family.layout.ours:
            model = graft(model, **arguments, allow_change=True)
            report = model.graft_report
            assert report.exact == (arguments["name"] == "sas")
            attention = model.grafted()[0]
            assert attention.o_proj.weight.dtype == torch.float64
            if family.layout.norm is not None:  # the family's norm, not one of ours
                assert "RMSNorm" in type(attention.q_norm).__name__ and type(attention.q_norm) is not nn.RMSNorm
        else:
            with pytest.raises(HeadloomError, match=f"layer 0: .* cannot stand on {name}'s attention: .*({problem})"):
                graft(model, **arguments, allow_change=True)


@pytest.mark.parametrize(
    "spec", [("mla", {"q_rank": 5}), ("mfa", {"qk_norm": "head"}), ("diff2", {"qk_norm": "width"})]
)
def test_mechanisms_with_norms_of_their_own(spec):
    sizes = {"hidden_size": 24, "num_layers": 2, "num_heads": 4, "intermediate_size": 29}
    model = build_model(spec, vocab_size=37, max_positions=32, **sizes)
    assert type(model.grafted()[0].q_norm) is nn.RMSNorm
    assert model(torch.randint(37, (1, 5))).logits.isfinite().all()
