"""Speed and memory of layers: what is counted is right, turns are taken, users' modules are compared. No seconds."""

from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

import headloom as hl
from headloom.bench import against, layers
from headloom.bench.asked import Named, Sizes
from headloom.bench.decode import decode
from headloom.bench.memory import peak_bytes
from headloom.bench.setting import Peak, Setting
from headloom.bench.speed import Timing, interleaved
from headloom.bench.subjects import Layers, configs_of, inputs, module_call, subject

SIZES = Sizes(24, 4)
MHA, IHA = Named("mha", "mha", {}), Named("iha", "iha", {"pseudo_heads": 2})
HYBRID = Named("hybrid", "hybrid", {"pseudo_heads": 2, "window": 3})
HOW = Setting(repeats=2, warmup=0)
MINE = """
import torch
from torch import nn


class Plain(nn.Module):
    def __init__(self, hidden_size: int, num_heads: int, factor: float = 1.0):
        super().__init__()
        self.heads, self.factor = num_heads, factor
        for letter in "qkvo":
            setattr(self, f"{letter}_proj", nn.Linear(hidden_size, hidden_size, bias=False))

    def forward(self, x):
        q, k, v = (getattr(self, f"{n}_proj")(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for n in "qkv")
        scores = (q @ k.transpose(-1, -2)) / q.shape[-1] ** 0.5
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        out = torch.softmax(scores.masked_fill(mask, -torch.inf), -1) @ v
        return (self.factor * self.o_proj(out.transpose(1, 2).flatten(2)),)


class Two(nn.Module):
    def forward(self, query, key):
        return query


class Narrow(nn.Module):
    def forward(self, x):
        return x[..., :1]


three = 3
"""


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """What a user might bring, in the folder where the command is called: our names and shapes, no rotation."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_bench", raising=False)
    (tmp_path / "mine_bench.py").write_text(MINE)
    yield "mine_bench"
    sys.modules.pop("mine_bench", None)


def test_a_schedule_is_one_period_and_its_flops_are_the_average():
    configs = configs_of(HYBRID, SIZES, 16)
    assert [config.window for config in configs] == [3, 3, 3, 3, None]
    made = subject(HYBRID, SIZES, 16, HOW)
    local = hl.cost("iha", tokens=16, hidden_size=24, num_heads=4, pseudo_heads=2, window=3).flops_exact
    whole = hl.cost("mha", tokens=16, hidden_size=24, num_heads=4).flops_exact
    assert made.layers == 5 and made.flops["exact"] == (4 * local + whole) / 5


def test_equal_seeds_give_equal_weights_and_inputs():
    one, two = (subject(MHA, SIZES, 8, HOW).module.state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert torch.equal(inputs(2, 8, 24, HOW), inputs(2, 8, 24, HOW))


def test_backward_leaves_no_gradient_and_forward_no_graph():
    made, x = subject(IHA, SIZES, 8, HOW), inputs(1, 8, 24, HOW)
    grads = []
    made.module.layers[0].q_proj.weight.register_hook(lambda grad: grads.append(grad.abs().sum()))
    module_call(made.module, x, "backward")()
    assert len(grads) == 1 and grads[0] > 0
    assert all(p.grad is None for p in made.module.parameters())
    assert not module_call(made.module, x, "forward")().requires_grad


def test_rows_of_speed():
    peak = Peak(HOW, shapes=((16, 16, 16),))
    rows = layers.speed([MHA, IHA, HYBRID], SIZES, HOW, tokens=[8, 5], batch_sizes=[2], peak=peak)
    points = [(row["tokens"], row["mode"], row["variant"]) for row in rows]
    modes, names = ("forward", "backward"), ("mha", "iha", "hybrid")
    assert points == [(T, mode, name) for T in (8, 5) for mode in modes for name in names]
    first = hl.cost("mha", tokens=8, hidden_size=24, num_heads=4)
    assert rows[0]["flops_full"] == 2 * first.flops_full and rows[3]["flops_exact"] == 6 * first.flops_exact
    for row in rows:
        seconds = row["seconds"]
        assert len(seconds["samples"]) == 2 and seconds["low"] <= seconds["median"] <= seconds["high"]
        for name in ("full", "exact"):
            expected = row[f"flops_{name}"] / seconds["median"] / peak.flops_per_second
            assert row[f"utilisation_{name}"] == pytest.approx(expected)
        assert sum(row["paths"].values()) == row["layers"]
    assert rows[0]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0} and rows[2]["layers"] == 5


def test_numbers_of_a_row_from_known_times(monkeypatch):
    """A schedule's five layers take 20 s: 4 a layer, twice the single layer's 2."""
    times = {"mha": [2.0, 2.0], "iha": [6.0, 4.0], "hybrid": [20.0, 20.0]}
    known = {name: Timing.of(samples) for name, samples in times.items()}
    monkeypatch.setattr(layers, "interleaved", lambda calls, **_: {name: known[name] for name in calls})
    peak = Peak(HOW, shapes=((16, 16, 16),))
    rows = layers.speed([MHA, IHA, HYBRID], SIZES, HOW, tokens=[8], batch_sizes=[3], modes=["backward"], peak=peak)
    assert [row["seconds"]["median"] for row in rows] == [2.0, 5.0, 4.0]
    assert [row["ratio"]["median"] for row in rows] == [1.0, 2.5, 2.0] and rows[1]["ratio"]["low"] == 2.25
    exact = hl.cost("mha", tokens=8, hidden_size=24, num_heads=4).flops_exact
    assert rows[0]["utilisation_exact"] == 3 * 3 * exact / 2.0 / peak.flops_per_second
    monkeypatch.setattr("headloom.bench.decode.interleaved", lambda calls, **_: {name: known[name] for name in calls})
    found = decode([MHA, HYBRID], SIZES, HOW, contexts=[8], batch_sizes=[3], new_tokens=2)
    assert (
        [row["token_ratio"]["median"] for row in found] == [row["prefill_ratio"]["median"] for row in found] == [1, 2]
    )
    assert [row["tokens_per_second"] for row in found] == [1.5, 0.75]


def test_ratios_are_of_the_same_repetition():
    """A machine that becomes three times slower half-way changes no ratio."""
    usual, other = Timing.of([1.0, 3.0, 3.0]), Timing.of([2.0, 6.0, 6.0])
    assert other.over(usual).samples == (2.0, 2.0, 2.0)
    assert other.per(2).samples == (1.0, 3.0, 3.0)


def test_layers_take_turns(monkeypatch):
    order = []
    real = interleaved

    def watched(calls, **options):
        return real({name: (lambda name=name: order.append(name)) for name in calls}, **options)

    monkeypatch.setattr(layers, "interleaved", watched)
    layers.speed([MHA, IHA], SIZES, HOW, tokens=[4], batch_sizes=[1], modes=["forward"])
    assert order == ["mha", "iha"] * 2


def test_the_peak_is_the_fastest_of_all_measurements(monkeypatch):
    times = iter([[2.0, 1.0], [4.0, 4.0], [0.5, 8.0], [9.0, 9.0]])
    monkeypatch.setattr(
        "headloom.bench.speed.interleaved",
        lambda calls, **_: {name: Timing.of(next(times)) for name in calls},
    )
    peak = Peak(HOW, shapes=((2, 3, 4), (5, 6, 7)))
    peak.measure()
    assert peak.flops_per_second == 2 * 5 * 6 * 7 / 4 and peak.shape == (5, 6, 7)
    peak.measure()
    assert peak.flops_per_second == 2 * 5 * 6 * 7 / 4, "the third pair is 2*2*3*4/0.5 = 96, below 105"
    assert peak.utilisation(105.0, 2.0) == 0.5 and peak.utilisation(None, 1.0) is None


def test_compiled_beside_eager():
    """More variants than torch.compile would by itself compile one piece of code for; none falls back."""
    variants = [Named(f"mha{width}", "mha", {"head_dim": width}) for width in (4, 8)]
    traced = []

    def backend(graph, example):
        traced.append(graph)
        return graph.forward

    with torch._dynamo.config.patch(recompile_limit=1):
        rows = layers.speed(variants, SIZES, HOW, tokens=[8], batch_sizes=[1], modes=["forward"], compile=backend)
    named = [("mha4", False), ("mha4", True), ("mha8", False), ("mha8", True)]
    assert [(row["variant"], row["compiled"]) for row in rows] == named and len(traced) == 2
    for row in rows[1::2]:
        assert row["compile_seconds"] > 0 and row["graph_breaks"] == {} and row["paths"] == {"fused": 1}
    assert rows[2]["ratio_to_own"]["median"] == 1.0 and "compile_seconds" not in rows[2]


def test_why_a_graph_breaks():
    def breaks(x):
        torch._dynamo.graph_break()
        return x + 1

    made = torch.compile(breaks, backend="eager")
    assert layers.first_compiled_call(lambda: made(torch.ones(2)))["graph_breaks"]


def test_peak_bytes_counts_what_a_fused_kernel_and_the_backward_allocate():
    x = torch.randn(100, 10, requires_grad=True)
    w = torch.randn(10, 50)

    def both():
        (x @ w).sum().backward()
        x.grad = None

    # out 100 x 50 and its sum, then: gradient of the sum (expanded: a number), of the product 100 x 10
    assert 100 * 50 * 4 + 100 * 10 * 4 <= peak_bytes(both) <= 100 * 50 * 4 + 100 * 10 * 4 + 64
    q = torch.randn(1, 2, 64, 8)
    fused = peak_bytes(lambda: nn.functional.scaled_dot_product_attention(q, q, q))
    assert fused > 1 * 2 * 64 * (8 + 1) * 4, "more than output and log-sum-exp: the kernel's own buffers"


def test_rows_of_memory_are_exact():
    rows = layers.memory([MHA, IHA], SIZES, HOW, tokens=[16, 32], batch_sizes=[1])
    again = layers.memory([MHA, IHA], SIZES, HOW, tokens=[16, 32], batch_sizes=[1])
    assert [row["peak_bytes"] for row in rows] == [row["peak_bytes"] for row in again]
    found = {(row["variant"], row["mode"], row["tokens"]): row for row in rows}
    assert found["mha", "forward", 32]["input_bytes"] == 32 * 24 * 4
    assert found["mha", "forward", 32]["weight_bytes"] == 4 * 24 * 24 * 4
    for mode in ("forward", "backward"):
        assert found["iha", mode, 32]["ratio"] > 1.5, "twice the tokens are kept"
    assert found["mha", "backward", 32]["peak_bytes"] > found["mha", "forward", 32]["peak_bytes"] > 4 * 32 * 24 * 4


def test_rows_of_decode():
    expanded = Named("expanded", "iha", {"pseudo_heads": 2, "cache": "expanded"})
    rows = decode([IHA, expanded, HYBRID], SIZES, HOW, contexts=[6], batch_sizes=[2], new_tokens=3)
    assert [row["cache_bytes"] for row in rows[:2]] == [2 * 6 * 48 * 4, 2 * 6 * 96 * 4]
    for row in rows:
        assert len(row["prefill_seconds"]["samples"]) == 2 and len(row["token_seconds"]["samples"]) == 3
        assert row["tokens_per_second"] == pytest.approx(2 / row["token_seconds"]["median"])
    assert rows[0]["token_ratio"]["median"] == 1.0


def test_a_decoded_token_is_the_uncached_one():
    """The session that is timed generates what the layer computes at once."""
    from headloom.bench.decode import _Session

    made, x = subject(MHA, SIZES, 6, HOW), inputs(1, 6, 24, HOW)
    session = _Session(made, x)
    session.prefill()
    out = []
    made.module.register_forward_hook(lambda module, args, output: out.append(output))
    session.token()
    longer = made.module(torch.cat((x, x[:, -1:]), 1))
    assert torch.allclose(out[0], longer[:, -1:], atol=1e-6)


@pytest.mark.parametrize("options", ["", ":factor=2.0"])
def test_against_the_same_function_and_twice_it(mine, options):
    text = f"{mine}:Plain{options}"
    plain = Named("mha", "mha", {"rope_theta": None})
    rows = layers.speed([plain, IHA], SIZES, HOW, tokens=[8], batch_sizes=[1], modes=["forward"], against=text)
    assert [row["variant"] for row in rows] == ["mha", "iha", text] and rows[2]["flops_exact"] is None
    same, other = rows[2]["differences"]
    if options:
        assert same["relative"] == pytest.approx(1.0, abs=1e-5)
    else:
        assert same["max_difference"] < 1e-6
    assert other["max_difference"] is None and "lacks k_mix.weight" in other["reason"]
    assert "differences" not in rows[0]


def test_a_straightforward_form_runs_beside_its_variant_with_its_weights(monkeypatch):
    forms = types.ModuleType("headloom.bench.plain")
    forms.plain_form = lambda attention: lambda same, x: 3 * same(x.repeat(3, 1, 1))[:1]
    monkeypatch.setitem(sys.modules, "headloom.bench.plain", forms)
    point = {"tokens": [8], "batch_sizes": [1], "modes": ["backward"], "plainly": True}
    rows = layers.speed([MHA, IHA], SIZES, HOW, **point)
    assert [row["variant"] for row in rows] == ["mha", "iha", "mha plain", "iha plain"]
    for fast, slow in zip(rows[:2], rows[2:], strict=True):
        (found,) = slow["differences"]
        assert found["variant"] == fast["variant"] and found["relative"] == pytest.approx(2.0)
        assert slow["flops_exact"] == fast["flops_exact"]
        own = [a / b for a, b in zip(slow["seconds"]["samples"], fast["seconds"]["samples"], strict=True)]
        assert slow["ratio_to_own"]["median"] == pytest.approx(sum(own) / 2)
    kept = layers.memory([MHA, IHA], SIZES, HOW, **point)
    assert kept[3]["ratio_to_own"] == kept[3]["peak_bytes"] / kept[1]["peak_bytes"] > 1
    with pytest.raises(hl.HeadloomError, match="hybrid is a schedule"):
        layers.speed([HYBRID], SIZES, HOW, **point)


def test_against_other_shapes_copies_nothing(mine):
    wide = subject(Named("mha", "mha", {"head_dim": 12}), SIZES, 8, HOW)
    found = against.compare_outputs(wide, against.build_theirs(f"{mine}:Plain", SIZES, HOW), inputs(1, 8, 24, HOW))
    assert found["max_difference"] is None and "q_proj.weight is (24, 24), not (48, 24)" in found["reason"]
    schedule = subject(HYBRID, SIZES, 8, HOW)
    found = against.compare_outputs(schedule, against.build_theirs(f"{mine}:Plain", SIZES, HOW), inputs(1, 8, 24, HOW))
    assert found["reason"] == "hybrid is no single layer"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("nowhere.at.all:Plain", "'nowhere.at.all' cannot be imported"),
        ("nowhere.py:Plain", "'nowhere.py' cannot be imported"),
        ("mine_bench", "must look like package.module:Class"),
        ("mine_bench:Plian", "Did you mean 'Plain'?"),
        ("mine_bench:three", "no torch.nn.Module class"),
        ("mine_bench:Plain:factor", "must look like name=value"),
        ("mine_bench:Plain:fctor=2", "It takes \\(hidden_size, num_heads, factor\\)"),
        ("mine_bench:Two", "cannot be called with x \\(1, 4, 24\\) alone"),
        ("mine_bench:Narrow", "must give the shape of its input, \\(1, 4, 24\\), not \\(1, 4, 1\\)"),
    ],
)
def test_modules_that_cannot_be_compared(mine, text, part):
    with pytest.raises(hl.HeadloomError, match=part):
        layers.speed([MHA], SIZES, HOW, tokens=[4], batch_sizes=[1], against=text)
    assert not [name for name in sys.modules if "nowhere" in name]


def test_a_files_name_may_be_a_librarys(tmp_path):
    (tmp_path / "json.py").write_text(MINE)
    text = f"{tmp_path}/json.py:Plain"
    theirs = against.build_theirs(text, SIZES, HOW).module
    assert type(theirs).__name__ == "Plain" and hasattr(sys.modules["json"], "dumps")


def test_wrong_sizes_name_the_variant():
    with pytest.raises(hl.HeadloomError, match="mha: num_kv_heads must divide num_heads"):
        layers.speed([MHA], Sizes(24, 4, num_kv_heads=3), HOW, tokens=[4], batch_sizes=[1])
    with pytest.raises(hl.HeadloomError, match="tokens must be at least 1, not 0"):
        layers.memory([MHA], SIZES, HOW, tokens=[0], batch_sizes=[1])
    with pytest.raises(hl.HeadloomError, match="new-tokens must be at least 1"):
        decode([MHA], SIZES, HOW, contexts=[4], batch_sizes=[1], new_tokens=0)


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({"device": "tpu"}, "device must be cpu or cuda"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"repeats": 0}, "repeats must be at least 1"),
        ({"threads": 0}, "threads must be at least 1"),
    ],
)
def test_wrong_settings(options, part):
    with pytest.raises(hl.HeadloomError, match=part):
        Setting(**options)


def test_a_setting_gives_threads_and_random_state_back():
    before, state = torch.get_num_threads(), torch.get_rng_state()
    with Setting(threads=before + 1).active():
        assert torch.get_num_threads() == before + 1
        torch.randn(3)
    assert torch.get_num_threads() == before and torch.equal(torch.get_rng_state(), state)


def test_a_stack_passes_the_cache_to_every_layer():
    stack, cache = Layers(configs_of(HYBRID, SIZES, 16)), hl.Cache()
    stack(torch.randn(1, 4, 24), cache=cache)
    assert [cache.length(layer) for layer in range(5)] == [4] * 5
