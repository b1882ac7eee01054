"""A graft made from a config, without a checkpoint, starts as its family does."""

import pytest

from headloom.hf.model.config import grafted_config

WIDE = {"hidden_size": 96, "intermediate_size": 61, "initializer_range": 0.05}
SPECS = {"iha": {"mechanism": "iha", "options": {"pseudo_heads": 2}}, "talking_heads": {"mechanism": "talking_heads"}}


@pytest.fixture
def fresh(base, graft_class):
    """fresh(spec): the family's own model and a graft of two of its three layers, as their classes initialise them."""

    def make(spec="iha", **more):
        model = base(**WIDE, **more)
        return type(model)(model.config), graft_class()(grafted_config(model.config, [SPECS[spec], None, SPECS[spec]]))

    return make


@pytest.mark.parametrize("spec", SPECS)
def test_every_tensor_is_as_spread_as_the_familys(fresh, spec):
    own, graft = fresh(spec)
    made = dict(graft.named_parameters())
    for name, parameter in own.named_parameters():
        wanted, got = parameter.detach().std(), made[name].detach().std()
        assert float(got) == pytest.approx(float(wanted), rel=0.1 if parameter.numel() > 2000 else 0.4), name


@pytest.mark.parametrize("name", ["gpt2"], indirect=True)
def test_outputs_of_gpt2_shrink_with_depth(fresh):
    for model in fresh():
        for layer in model.transformer.h:
            for weight, std in ((layer.attn.c_proj.weight, 0.05 / 6**0.5), (layer.attn.c_attn.weight, 0.05)):
                assert float(weight.detach().std()) == pytest.approx(std, rel=0.05)


@pytest.mark.parametrize("name", ["modernbert"], indirect=True)
def test_weights_of_modernbert_are_cut_off(fresh):
    for model in fresh(initializer_cutoff_factor=1.5):
        for layer in model.model.layers:
            for weight, std in ((layer.attn.Wqkv.weight, 0.05), (layer.attn.Wo.weight, 0.05 / 6**0.5)):
                assert 1.45 * std < float(weight.detach().abs().max()) <= 1.5 * std * (1 + 1e-6)
