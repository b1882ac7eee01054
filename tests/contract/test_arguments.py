"""What may be given: a user's mistake is one HeadloomError that says what came and what is allowed."""

import inspect
import pydoc

import pytest
import torch

import headloom as hl
from headloom.core.config import fields_of
from headloom.mechanism import AttentionConfig

B, T, D = 2, 7, 12


@pytest.fixture(scope="module")
def attn():
    torch.manual_seed(0)
    return hl.attention("iha", D, 3, pseudo_heads=2).double()


@pytest.fixture(scope="module")
def x():
    return torch.randn(B, T, D, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def test_sizes_by_place_are_those_by_name():
    assert hl.attention("iha", 64, 4).config == hl.attention("iha", hidden_size=64, num_heads=4).config
    config = hl.make_config("iha", hidden_size=64, num_heads=4, pseudo_heads=2)
    assert hl.attention(config).config is config


def test_a_boolean_mask_is_its_dense(attn, x):
    visible = torch.rand(B, T, T, generator=torch.Generator().manual_seed(2)) > 0.4
    expected = attn(x, mask=hl.Dense(visible))
    assert (attn(x, mask=visible) - expected).abs().max() < 1e-14
    assert (attn(x, mask=visible[:, None]) - expected).abs().max() < 1e-14
    both = attn(x[:1], mask=visible[0])
    assert (both - expected[:1]).abs().max() < 1e-12
    assert (attn(x) - expected).abs().max() > 1e-3  # the mask does something


@pytest.mark.parametrize(
    ("call", "parts"),
    [
        (
            lambda a, x: a(x, mask=torch.ones(T, T)),
            ["mask must be", "not a float32 tensor", "mask.bool()", "mask == 0"],
        ),
        (lambda a, x: a(x, mask="causal"), ["mask must be", "hl.Causal()", "not 'causal'"]),
        (lambda a, x: a(x, mask=torch.ones(B, T).bool()), [f"the mask is for ({B}, {T})", f"this call has ({T}, {T})"]),
        (lambda a, x: a(x, mask=torch.ones(3, T, T).bool()), ["the mask is for 3 sequences and the input has 2"]),
        (lambda a, x: a(x, mask=hl.Exactly(hl.Dense(torch.ones(3, T, T).bool()))), ["the mask is for 3 sequences"]),
        (lambda a, x: a(x, mask=hl.Causal() & torch.ones(T, T).bool()), ["joined with masks", "hl.Dense"]),
        (lambda a, x: a(x, mask=hl.Documents([0, 1])), ["Documents takes a tensor, not a list"]),
        (lambda a, x: a(x, mask=hl.Dense(None)), ["Dense takes a tensor, not a NoneType"]),
        (lambda a, x: a(x.float()), ["the input is float32 and the weights are float64", ".to(torch.float32)"]),
        (lambda a, x: a(torch.zeros(B, T, D).long()), ["floating-point numbers", "not token ids", "int64"]),
        (lambda a, x: a(x[..., :5]), [f"shape (B, T, {D}), not ({B}, {T}, 5)"]),
        (lambda a, x: a("text"), ["the input must be a tensor", "not 'text'"]),
        (lambda a, x: a(x.to("meta")), ["the input is on meta and the weights are on cpu"]),
        (lambda a, x: a(x, positions=torch.arange(T) * 1.0), ["positions must be whole numbers, not float32"]),
        (lambda a, x: a(x, positions=[0, 1]), ["positions must be a tensor of whole numbers, not a list"]),
        (lambda a, x: a(x, documents=torch.ones(B, T).bool()), ["documents must be whole numbers, not bool"]),
        (lambda a, x: a(x, padding=torch.ones(B, T)), ["padding must be whole numbers or booleans, not float32"]),
        (lambda a, x: a(x, cache={}), ["cache must be a hl.Cache(), not a dict"]),
        (lambda a, x: a.maps(x, mask="causal"), ["mask must be"]),
        (lambda a, x: hl.maps(torch.nn.Linear(2, 2), x), ["hl.maps takes one attention", "not a Linear", "self_attn"]),
        (lambda a, x: hl.maps(a, torch.zeros(1, 4).long()), [f"shape (B, T, {D})"]),
        (lambda a, x: hl.attention(3, 64, 4), ["a mechanism's name must be a text", "not 3"]),
        (lambda a, x: hl.attention("iha"), ["iha needs hidden_size and num_heads"]),
        (lambda a, x: hl.attention(a.config, causal=False), ["causal beside a IHAConfig", "config.replace"]),
        (lambda a, x: hl.attention("iha", 64, 4, window="w"), ["window must be an int or None, not 'w'"]),
        (lambda a, x: hl.schedule(3, num_layers=2), ["give a schedule's name", "not 3"]),
        (lambda a, x: hl.schedule([3], num_layers=2), ["a mechanism's name or (name, options), not 3"]),
        (lambda a, x: hl.schedule("iha", num_layers="2"), ["num_layers must be a whole number, not '2'"]),
        (lambda a, x: hl.schedule(["iha"], num_layers=2, windows=3), ["windows must be a list", "not 3"]),
        (lambda a, x: hl.cost("iha", hidden_size=8, num_heads=2, tokens="8"), ["tokens must be a whole number"]),
        (lambda a, x: hl.pack_bits("x"), ["torch.nn.Module", "not 'x'"]),
        (lambda a, x: hl.mix_names(None), ["torch.nn.Module", "not None"]),
        (lambda a, x: hl.parameter_groups(a, "x"), ["weight_decay must be a number of at least 0, not 'x'"]),
    ],
)
def test_one_sentence_says_what_is_wrong(attn, x, call, parts):
    with pytest.raises(hl.HeadloomError) as caught:
        call(attn, x)
    line = str(caught.value)
    assert "\n" not in line
    for part in parts:
        assert part in line


def test_a_cache_of_other_sequences_is_refused(attn, x):
    cache = hl.Cache()
    attn(x, cache=cache)
    with pytest.raises(hl.HeadloomError, match="the cache holds 2 sequences and the input 1"):
        attn(x[:1], cache=cache)


def test_autocast_may_meet_other_types(x):
    plain = hl.attention("mha", D, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain(x.float().bfloat16()).dtype == torch.bfloat16


def test_help_and_editors_see_the_options():
    found = inspect.signature(hl.attention)
    config, parameters = fields_of(AttentionConfig), dict(found.parameters)
    assert list(parameters)[:3] == ["name", "hidden_size", "num_heads"]
    hints = inspect.get_annotations(hl.attention, eval_str=True)
    common = set(config)
    assert common == set(parameters) - {"name", "options"}
    assert {name: hints[name] for name in common} == {name: config[name] for name in common}
    page = pydoc.plain(pydoc.render_doc(hl.attention))
    for part in ("rope_scaling", "headloom list NAME", "num_heads: H"):
        assert part in page


def test_results_show_themselves_shortly(attn, x):
    assert repr(hl.maps(attn, x)) == "Maps(patterns (2, 3, 14, 14), effective (2, 3, 3, 7, 7))"
    shown = repr(hl.cost("mha", hidden_size=8, num_heads=2, tokens=4))
    assert shown.startswith("Cost(mha, 4 tokens: 256 parameters, ") and len(shown) < 200


@pytest.mark.parametrize("name", list(hl.mechanisms()))
def test_every_config_class_is_imported_from_headloom(name):
    cls = hl.mechanisms()[name].config_cls
    assert getattr(hl, cls.__name__) is cls
    attn = hl.attention(cls.tiny())
    assert type(attn.config) is cls and attn.config == cls.tiny()


def test_a_config_class_that_is_none_is_no_name_of_headloom():
    with pytest.raises(AttributeError, match="module 'headloom' has no attribute 'IHHAConfig'"):
        hl.IHHAConfig  # noqa: B018
