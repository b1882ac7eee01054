"""Layer schedules: patterns over the depth, and the paper's hybrid."""

from __future__ import annotations

import pytest
import torch

import headloom as hl
from headloom.costs.count import layer_costs
from headloom.mechanism.schedules import layers_of, option_classes, over_depth, pattern_of, places, schedules


@pytest.mark.parametrize(("P", "window", "exact"), [(2, 1024, 0.95), (4, 256, 0.99), (8, 64, 1.00)])
def test_the_papers_hybrid(P: int, window: int, exact: float):
    """W = N / (2 P^2); 3/5 of global mha as full rectangles, 0.95, 0.99, 1.00 by visible pairs of tokens."""
    layers = hl.schedule("hybrid", num_layers=10, tokens=8192, pseudo_heads=P)
    assert layers == ([("iha", {"pseudo_heads": P, "window": window})] * 4 + [("mha", {})]) * 2
    costs = layer_costs(layers[:5], tokens=8192, hidden_size=64, num_heads=4)
    usual = hl.cost("mha", tokens=8192, hidden_size=64, num_heads=4)
    rectangles = sum(c.core_flops_rectangle for c in costs) / 5
    assert rectangles == pytest.approx(0.6 * usual.core_flops_full, rel=1e-12)
    causal = sum(c.core_flops_causal for c in costs) / 5 / usual.core_flops_causal
    assert round(causal, 2) == exact
    assert causal == pytest.approx((4 * P * P * (2 * window / 8192 - (window / 8192) ** 2) + 1) / 5, abs=1e-3)
    token = layer_costs([(n, {**o, "order": "token"} if n == "iha" else o) for n, o in layers[:5]], tokens=8192,
                        hidden_size=64, num_heads=4)  # fmt: skip
    assert sum(c.core_flops_exact for c in token) == pytest.approx(sum(c.core_flops_causal for c in costs), rel=1e-12)


def test_visible_pairs_of_an_encoder_with_a_window():
    """T = 5, W = 2: 2, 3, 3, 3, 2 keys."""
    found = hl.cost("mha", tokens=5, hidden_size=8, num_heads=2, window=2, causal=False)
    assert found.core_flops_causal == found.core_flops_exact == found.core_flops_full * 13 / 25


def test_patterns_repeat_and_are_cut_off():
    pattern = ["iha"] * 4 + ["mha"]
    layers = hl.schedule(pattern, num_layers=7, windows=[64] * 4 + [None], dropout=0.1)
    names = [name for name, _ in layers]
    assert names == ["iha"] * 4 + ["mha"] + ["iha"] * 2
    assert [options["window"] for _, options in layers] == [64] * 4 + [None] + [64] * 2
    assert all(options["dropout"] == 0.1 for _, options in layers)
    mixed = hl.schedule([("iha", {"window": 3, "pseudo_heads": 2}), "gqa"], num_layers=2)
    assert mixed == [("iha", {"window": 3, "pseudo_heads": 2}), ("gqa", {})]
    assert hl.schedule("sas", num_layers=2, kernel_size=1) == [("sas", {"kernel_size": 1})] * 2
    assert places([0]) == "0" and places([4, 9]) == "4,9"


def test_options_reach_the_layers_that_have_them():
    found = pattern_of("hybrid", {"local": 1, "window": 5, "order": "token", "qk_norm": "head"}, num_layers=2)
    own = {"pseudo_heads": 2, "window": 5, "order": "token", "qk_norm": "head"}
    assert found == [("iha", own), ("mha", {"qk_norm": "head"})]
    assert layers_of("mha", {"window": 3}, num_layers=2) == [("mha", {"window": 3})] * 2


def test_a_shallow_model_has_fewer_local_layers():
    names = [name for name, _ in hl.schedule("hybrid", num_layers=3, tokens=64)]
    assert names == ["iha", "iha", "mha"]
    assert [name for name, _ in hl.schedule("hybrid", num_layers=6, tokens=64)].count("mha") == 1


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: hl.schedule("hybrid", num_layers=5), "give tokens, the context N, or a window"),
        (lambda: hl.schedule("hybrid", num_layers=5, tokens=64, pseudo_heads=8), r"below 1 for a context of 64 and"),
        (lambda: hl.schedule("hybrid", num_layers=1, tokens=64), "at least 2 layers, a local and a global one, not 1"),
        (lambda: hl.schedule("hybrid", num_layers=4, tokens=64, local=4), "of 5 layers does not fit a model of 4"),
        (lambda: hl.schedule("hybrid", num_layers=5, tokens=64, local=0), "local must be at least 1, not 0"),
        (lambda: hl.schedule("hybrid", num_layers=5, tokens=64, locl=2), "unknown option 'locl' of hybrid.*'local'"),
        (lambda: hl.schedule("hybird", num_layers=5, tokens=64), "unknown mechanism 'hybird'. Did you mean 'hybrid'"),
        (lambda: hl.schedule(["iha", "hybrid"], num_layers=5), "'hybrid' is a schedule of many layers"),
        (lambda: hl.schedule(["ihaa"], num_layers=5), "unknown mechanism 'ihaa'"),
        (lambda: hl.schedule([("iha", {"windw": 4})], num_layers=5), "Did you mean 'window'"),
        (lambda: hl.schedule([], num_layers=5), "an empty pattern"),
        (lambda: hl.schedule(["iha", "mha"], num_layers=5, windows=[4]), "1 windows came for a pattern of 2 layers"),
        (lambda: over_depth([("mha", {})], 0), "num_layers must be at least 1"),
    ],
)  # fmt: skip
def test_wrong_schedules(call, message: str):
    with pytest.raises(hl.HeadloomError, match=message):
        call()


def test_names_are_free_and_papers_named():
    assert not set(schedules()) & set(hl.mechanisms())
    for found in schedules().values():
        assert (found.paper.startswith("arXiv:") or found.name == "pattern") and found.title and found.summary
        assert list(option_classes(found.name)[1:]) == [hl.mechanisms()[name].config_cls for name in found.mechanisms]


def test_a_model_of_the_hybrid():
    """Local layers see W tokens; a cached run, whose local layers drop what they cannot see, equals the whole."""
    sizes = {"vocab_size": 37, "hidden_size": 24, "num_heads": 4, "intermediate_size": 30, "num_layers": 5}
    model = hl.build_model(("hybrid", {"pseudo_heads": 2}), **sizes, max_positions=32).double().eval()
    windows = [layer.self_attn.config.window for layer in model.model.layers]
    assert windows == [4] * 4 + [None]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    ids = torch.randint(0, 37, (2, 11))
    whole = model(ids, use_cache=False).logits
    out = model(ids[:, :7], use_cache=True)
    steps = [out.logits]
    for t in range(7, 11):
        out = model(ids[:, t : t + 1], cache=out.cache, use_cache=True)
        steps.append(out.logits)
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0, atol=1e-9)
    assert [layer.keys.shape[2] for layer in out.cache.layers] == [3] * 4 + [11]
    pattern = hl.build_model(hl.schedule(["iha", "mha"], num_layers=5, windows=[3, None]), **sizes, max_positions=32)
    assert [layer.self_attn.name for layer in pattern.model.layers] == ["iha", "mha", "iha", "mha", "iha"]
    assert [layer.self_attn.config.window for layer in pattern.model.layers] == [3, None, 3, None, 3]
