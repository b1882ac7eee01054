"""The scores alone: what is handed to the core is what the layer scores, and what is counted is what is timed."""

from __future__ import annotations

import pytest
import torch

import headloom as hl
from headloom.bench import core, layers
from headloom.bench.asked import Named, Sizes
from headloom.bench.setting import Setting
from headloom.bench.speed import Timing
from headloom.bench.subjects import configs_of, inputs, subject
from headloom.mechanism import Attention

SIZES, HOW, T = Sizes(24, 4), Setting(repeats=2, warmup=0), 32
NAMED = {
    "mha": Named("mha", "mha", {}),
    "window": Named("window", "mha", {"window": 5}),
    "iha": Named("iha", "iha", {"pseudo_heads": 2, "window": 5}),
    "paired": Named("paired", "iha", {"pseudo_heads": 2, "interaction": "paired"}),
    "tpa": Named("tpa", "tpa", {}),
    "mla": Named("mla", "mla", {"absorb": "never"}),
    "diff": Named("diff", "diff", {}),
    "linear": Named("linear", "linear", {}),
    "simplicial": Named("simplicial", "simplicial", {"rope_theta": None}),
    "talking_heads": Named("talking_heads", "talking_heads", {}),
}


@pytest.mark.parametrize("named", NAMED.values(), ids=NAMED)
def test_the_layers_own_tail_makes_its_output_of_what_was_handed(named):
    made, x = subject(named, SIZES, T, HOW), inputs(2, T, 24, HOW)
    layer = made.attention
    with torch.no_grad():
        out = layer.core(*core.handed(layer, x))
        assert torch.equal(layer.output(layer.merge(out, x)), layer(x))
    assert "core" not in vars(layer), "the layer is as it was"


@pytest.mark.parametrize("name", [name for name in NAMED if name != "simplicial"])
def test_flops_are_those_that_cost_counts_for_the_scores(name):
    (config,) = configs_of(NAMED[name], SIZES, T)
    parts = hl.cost(NAMED[name].mechanism, tokens=T, **config.to_dict()).parts
    (scores,) = [part for part in parts if part.step == "score"]
    assert core.core_flops(config, T) == {"full": scores.flops_full, "exact": scores.flops_exact}


def test_flops_by_hand():
    """Two products of 2 x 6 x 4 heads a pair. In W = 5 rows see 1, 2, 3, 4, 5, 5, ...; P = 2 makes 4 pairs of
    pseudo-tokens of each, without one in a token's own, which the paper's order leaves out."""
    flops = {name: core.core_flops(configs_of(NAMED[name], SIZES, T)[0], T) for name in ("mha", "window", "iha")}
    a_pair, seen = 2 * 2 * 24, 5 * 6 // 2 + 27 * 5
    assert flops["mha"] == {"full": a_pair * T**2, "exact": a_pair * T * (T + 1) // 2}
    assert flops["window"] == {"full": a_pair * T**2, "exact": a_pair * seen}
    assert flops["iha"] == {"full": 4 * a_pair * T**2, "exact": a_pair * (4 * seen - T)}


def test_rows_are_of_the_scores():
    """A schedule's row is the mean over its period: four local layers and a global one."""
    hybrid = Named("hybrid", "hybrid", {"pseudo_heads": 2})
    rows = layers.speed([NAMED["mha"], hybrid], SIZES, HOW, tokens=[T], batch_sizes=[3], part="scores")
    assert [(row["variant"], row["mode"], row["part"], row["layers"]) for row in rows] == [
        (name, mode, "scores", count) for mode in ("forward", "backward") for name, count in (("mha", 1), ("hybrid", 5))
    ]
    assert configs_of(hybrid, SIZES, T)[0].window == T // 8
    mean = (4 * core.core_flops(configs_of(hybrid, SIZES, T)[0], T)["exact"] + 16 * 6 * T * (T + 1) // 2) / 5
    assert [row["flops_exact"] for row in rows[1::2]] == pytest.approx([3 * mean, 9 * mean])
    assert [sum(row["paths"].values()) for row in rows] == [1, 5, 1, 5]


def test_what_is_timed_is_the_core_on_what_was_handed(monkeypatch):
    """No projection runs in a timed call, and q, k, v have the layer's values."""
    ran, scored = [], []
    hook = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, args: ran.append(module))

    def timed(calls, **_):
        ran.clear(), scored.clear()
        calls["iha"]()
        assert len(scored) == 1 and not ran
        return {"iha": Timing.of([1.0])}

    monkeypatch.setattr(layers, "interleaved", timed)
    plain = Attention.core
    monkeypatch.setattr(Attention, "core", lambda self, *given: scored.append(given) or plain(self, *given))
    layers.speed([NAMED["iha"]], SIZES, HOW, tokens=[T], batch_sizes=[1], part="scores")
    hook.remove()
    made = subject(NAMED["iha"], SIZES, T, HOW)
    expected = core.handed(made.attention, inputs(1, T, 24, HOW))
    assert all(torch.equal(a, b) and a.requires_grad for a, b in zip(scored[0][:3], expected[:3], strict=True))


@pytest.mark.parametrize(("pseudo_heads", "window"), [(2, 1024), (4, 256), (8, 64)])
def test_the_hybrids_windows_are_the_papers(pseudo_heads, window):
    configs = configs_of(Named("h", "hybrid", {"pseudo_heads": pseudo_heads}), Sizes(512, 8), 8192)
    assert [config.window for config in configs] == [window] * 4 + [None]


def test_backward_goes_down_to_q_k_v_and_what_the_core_learns_and_no_further(monkeypatch):
    asked = []
    real = torch.autograd.grad

    def grad(out, into, *rest, **options):
        found = real(out, into, *rest, **options)
        asked.append([x is not None for x in found])
        return found

    monkeypatch.setattr(torch.autograd, "grad", grad)
    for name, learned in (("iha", 0), ("talking_heads", 2)):
        made = subject(NAMED[name], SIZES, T, HOW)
        core.call(made, inputs(1, T, 24, HOW), "backward")()
        assert asked.pop()[:3] == [True] * 3
        core.call(made, inputs(1, T, 24, HOW), "backward")()
        assert sum(asked.pop()[3:]) == learned
        assert all(p.grad is None for p in made.module.parameters())


class Own(Attention):
    name = "own"

    def score(self, q, handle, visibility):
        return q


def test_what_has_no_core_is_refused():
    point = {"tokens": [T], "batch_sizes": [1], "part": "scores"}
    deltaformer = Named("delta", "deltaformer", {})
    with pytest.raises(hl.HeadloomError, match="in deltaformer tokens meet before they are scored too"):
        layers.speed([deltaformer], SIZES, HOW, **point)
    (config,) = configs_of(NAMED["mha"], SIZES, T)
    with pytest.raises(hl.HeadloomError, match="own scores in a way of its own"):
        core.handed(Own(config), torch.randn(1, T, 24))
    for other in ({"plainly": True}, {"compile": "eager"}, {"against": "a:B"}):
        with pytest.raises(hl.HeadloomError, match="have no other form to be timed beside"):
            layers.speed([NAMED["mha"]], SIZES, HOW, **point, **other)
    with pytest.raises(hl.HeadloomError, match=r"unknown part 'score'\. Did you mean 'scores'"):
        layers.speed([NAMED["mha"]], SIZES, HOW, **{**point, "part": "score"})
