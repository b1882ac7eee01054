"""Measured costs equal the closed forms and the published counts; timing is interleaved."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import headloom as hl
from headloom.bench.speed import Timing, interleaved
from headloom.costs.count import Cost, cost, model_cost
from headloom.mechanism import Attention

D, H, K, T = 768, 12, 64, 32
PUBLISHED = {"simulated_heads": 36, "simulated_width": 96}


@pytest.mark.parametrize(("order", "count"), [("head_first", 663_552), ("feature_first", 350_208)])
def test_published_simulation_counts(order: str, count: int):
    found = cost("sas", hidden_size=D, num_heads=H, tokens=T, kernel_size=1, order=order, **PUBLISHED)
    assert found.simulation_multiply_adds == count


@pytest.mark.parametrize(("kernel", "extra"), [(5, 57_240), (1, 36_504)])
def test_published_extra_parameters(kernel: int, extra: int):
    found = cost("sas", hidden_size=D, num_heads=H, tokens=T, kernel_size=kernel, **PUBLISHED)
    assert found.parameters == 4 * D * D + extra


@pytest.mark.parametrize("P", [2, 3])
@pytest.mark.parametrize(("order", "extra_pairs"), [("virtual", 0), ("token", 1)])
def test_iha_closed_form(P: int, order: str, extra_pairs: int):
    found = cost("iha", hidden_size=D, num_heads=H, tokens=T, pseudo_heads=P, order=order)
    assert found.parameters == 4 * D * D + 4 * H * H * P
    assert found.cache_elements_per_token == 2 * H * K and found.cache_bytes_per_token == 8 * H * K
    projections = 2 * T * 4 * D * D
    mixes = 2 * T * 4 * H * H * P * K
    pairs = T * P * (T * P + 1) // 2 + extra_pairs * T * P * (P - 1) // 2
    assert found.flops_exact == projections + mixes + 2 * pairs * H * 2 * K
    assert found.flops_full == projections + mixes + 2 * (T * P) ** 2 * H * 2 * K
    expanded = cost("iha", hidden_size=D, num_heads=H, tokens=T, pseudo_heads=P, cache="expanded")
    assert expanded.cache_elements_per_token == 2 * P * H * K


def test_iha_over_fewer_kv_heads_and_paired():
    G, P = 3, 2
    found = cost("iha", hidden_size=D, num_heads=H, num_kv_heads=G, tokens=T, pseudo_heads=P)
    base = D * D * 2 + 2 * D * G * K
    assert found.parameters == base + H * P * (H + 2 * G) + H * H * P
    paired = cost("iha", hidden_size=D, num_heads=H, num_kv_heads=G, tokens=T, pseudo_heads=P, interaction="paired")
    assert paired.parameters == base + H * P * (H + 2 * G)
    score = {part.step: part.flops_exact for part in paired.parts}["score"]
    assert score == 2 * (T * (T + 1) // 2) * H * P * 2 * K


def test_grouped_heads_cost_the_scores_of_all_queries():
    """8 query and 2 kv heads cost the score FLOPs of 8 and 8; head_dim is free."""
    eight, two = (
        cost("gqa" if g < 8 else "mha", hidden_size=64, num_heads=8, num_kv_heads=g, tokens=T) for g in (8, 2)
    )
    score = [{p.step: p.flops_full for p in c.parts}["score"] for c in (eight, two)]
    assert score[0] == score[1] == 2 * T * T * 8 * 16
    free = cost("mha", hidden_size=1024, num_heads=47, head_dim=64, tokens=T)
    assert free.parameters == 4 * 1024 * 47 * 64


def test_windows_count_exactly():
    W = 5
    found = cost("mha", hidden_size=D, num_heads=H, tokens=T, window=W)
    pairs = sum(min(i + 1, W) for i in range(T))
    assert {p.step: p.flops_exact for p in found.parts}["score"] == 2 * pairs * H * 2 * K


def test_value_and_query_widths_are_not_padded():
    found = cost("sas", hidden_size=D, num_heads=H, tokens=T, **PUBLISHED)
    assert {p.step: p.flops_full for p in found.parts}["score"] == 2 * T * T * 36 * (96 + 64)


@pytest.mark.parametrize("name", list(hl.mechanisms()))
def test_full_convention_equals_pytorchs_counter_on_plain_products(name: str):
    """Full scores count as matmul - softmax - matmul; parts add up; backward is twice forward."""
    config = hl.mechanisms()[name].config_cls.tiny()
    attn = hl.attention(config)
    x = torch.randn(2, 7, config.hidden_size)
    if (type(attn).score, type(attn).core) == (
        Attention.score,
        Attention.core,
    ):  # one that scores otherwise has its closed form in its own test
        call = attn._prepare(x)
        with FlopCounterMode(display=False) as plain:
            given = (call.q, *attn.expand(call.handle))
            q, k, v = (y.repeat_interleave(call.q.shape[1] // y.shape[1], 1) for y in given)
            between = [hook or torch.nn.Identity() for hook in (attn.on_logits, attn.on_weights)]
            between[1](torch.softmax(between[0](q @ k.transpose(-1, -2)), -1)) @ v
        with FlopCounterMode(display=False) as ours:
            attn.score(call.q, call.handle, call.visibility)
        assert ours.get_total_flops() == plain.get_total_flops()
    with FlopCounterMode(display=False) as forward:
        out = attn(x.requires_grad_())
    with FlopCounterMode(display=False) as backward:
        out.sum().backward()
    assert backward.get_total_flops() == 2 * forward.get_total_flops()
    one = hl.cost(name, tokens=7, **config.to_dict())
    assert 2 * one.flops_full == forward.get_total_flops()
    assert one.flops_exact <= one.flops_full and sum(p.flops_exact for p in one.parts) == one.flops_exact


def test_cost_is_json_and_refuses_nonsense():
    found = cost("mha", hidden_size=8, num_heads=2, tokens=4, dtype="bfloat16")
    assert isinstance(found, Cost) and found.to_dict()["cache_bytes_per_token"] == 2 * 2 * 8
    with pytest.raises(hl.HeadloomError, match="dtype must be"):
        cost("mha", hidden_size=8, num_heads=2, dtype="int8")
    with pytest.raises(hl.HeadloomError, match="tokens must be at least 1"):
        cost("mha", hidden_size=8, num_heads=2, tokens=0)


def test_tied_and_untied_models_cost_equal_flops():
    """Vocabulary 10, width 4: equal FLOPs, 40 fewer parameters when tied."""
    made = [
        hl.build_model(
            ("mha", {}), vocab_size=10, hidden_size=4, num_layers=1, num_heads=1, intermediate_size=8,
            max_positions=16, tie_embeddings=tied, device="meta",
        )
        for tied in (True, False)
    ]  # fmt: skip
    tied, untied = (model_cost(model, 8) for model in made)
    assert untied["parameters"] - tied["parameters"] == 40
    assert tied["flops_full"] == untied["flops_full"] and tied["flops_exact"] == untied["flops_exact"]


def test_interleaving_takes_turns():
    order: list[str] = []
    timings = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, repeats=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert all(len(t.samples) == 3 and t.low <= t.median <= t.high for t in timings.values())
    assert Timing.of([2.0]).low == 2.0 and Timing.of([1.0, 2.0, 4.0]).median == 2.0
