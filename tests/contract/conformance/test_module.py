"""What a module is, for every mechanism: shapes, types, round trips, gradients, compile, initialisation, cost."""

import copy
import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ORACLES
from oracles.common import settings
from oracles.compare import assert_close, draw, weights_of
from oracles.modules import module_of
from oracles.strategies import calls, configs, examples, paddings
from oracles.variations import only

import headloom as hl
from headloom.mechanism import build_from_config, make_config
from headloom.ops.mixing import Mix


def linear(config):
    """Rounded numbers have straight-through gradients, which are not the derivative."""
    return config.projection == "linear"


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


@given(data=st.data())
def test_shape_and_type(mechanism, data):
    config, tokens = data.draw(configs(mechanism)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from(TYPES))
    out = module_of((mechanism, config), dtype)(draw(3, tokens, config.hidden_size).to(dtype))
    assert out.shape == (3, tokens, config.hidden_size) and out.dtype == dtype and torch.isfinite(out).all()


# names without an oracle here have their own test
@only(lambda name, config: name in ORACLES)
@pytest.mark.parametrize("dtype", TYPES[1:])
def test_low_precision_is_close(few, dtype):
    """The error against float64 is within twice that of the oracle run wholly in the low precision (in the root mean
    square; the largest one, a single draw of a maximum, within four times). In float32 the oracle runs twice, with
    weights divided by their sum and weights from a rounded log-sum-exp, as fused kernels have them."""
    name, config = few
    x = draw(1, 5, config.hidden_size).to(dtype)
    module = module_of(few, dtype, spread=0.2)  # moderate logits: many roundings meet, not one blown up
    s = settings(name, **config.to_dict())
    exact = ORACLES[name].output(weights_of(module), x.double(), s).detach()
    runs = []
    for s.by_log_sum in (False, True) if dtype == torch.float32 else (False,):
        runs.append(ORACLES[name].output(weights_of(module, dtype), x, s).detach().double() - exact)
    for size, times in ((lambda e: e.pow(2).mean().sqrt(), 2), (lambda e: e.abs().max(), 4)):
        error, allowed = size(module(x).detach().double() - exact), times * max(map(size, runs))
        assert error <= allowed, f"error {error:.2e}, {times} times the independent runs' is {allowed:.2e}"


@given(data=st.data())
def test_config_round_trip(mechanism, data):
    """to_dict is strict JSON; from_dict gives an equal config; both build equal modules."""
    config = data.draw(configs(mechanism))
    text = json.dumps(config.to_dict(), allow_nan=False)
    again = type(config).from_dict(json.loads(text))
    assert again == config and hash(config) is not None
    assert make_config(mechanism, **json.loads(text)) == config
    module = build_from_config(again)
    assert type(module) is type(hl.attention(mechanism, **config.to_dict())) and module.config == config
    with pytest.raises(Exception, match="cannot assign"):
        config.causal = not config.causal


@given(data=st.data())
def test_state_round_trip(mechanism, data):
    config = data.draw(configs(mechanism))
    module, other = (module_of((mechanism, config), seed=seed) for seed in (1, 2))
    x = draw(2, 5, config.hidden_size)
    assert (module(x) - other(x)).abs().max() > 1e-9
    other.load_state_dict(module.state_dict(), strict=True)
    assert torch.equal(module(x), other(x))
    assert set(module.state_dict()) == {n for n, _ in module.named_parameters()}
    assert torch.equal(copy.deepcopy(module)(x), module(x))


@given(data=st.data())
def test_every_parameter_gets_a_gradient(mechanism, data):
    """No parameter is left out of the graph, and none of random weights has a zero gradient everywhere."""
    config = data.draw(configs(mechanism))
    module = module_of((mechanism, config))
    module(draw(2, 7, config.hidden_size)).pow(2).sum().backward()
    silent = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    scoring = ("q_", "k_", "k2_", "beta_", "head_q", "head_k", "feature_q", "feature_k", "logit_mix")
    scored = [n for n in silent if not n.startswith(scoring)]
    assert not (scored if config.score == "hard" or config.window == 1 else silent), silent


@given(data=st.data())
def test_gradcheck(mechanism, data):
    """Gradients against finite differences, with padding, documents and positions, in float64."""
    config, call = data.draw(configs(mechanism, linear)), data.draw(calls())
    module = module_of((mechanism, config))
    x = draw(call.batch, call.tokens, config.hidden_size)
    names = [n for n, _ in module.named_parameters()]
    generator = torch.Generator().manual_seed(2)
    directions = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in [x, *module.parameters()]]
    cotangent = draw(*x.shape, seed=3)

    def value(t):
        with torch.no_grad():
            moved = {n: p + t * d for (n, p), d in zip(module.named_parameters(), directions[1:], strict=True)}
            return (torch.func.functional_call(module, moved, (x + t * directions[0],), call.sides) * cotangent).sum()

    start = x.clone().requires_grad_()
    loss = (module(start, **call.sides) * cotangent).sum()
    gradients = torch.autograd.grad(loss, [start, *module.parameters()], allow_unused=True)
    slope = sum((g * d).sum() for g, d in zip(gradients, directions, strict=True) if g is not None)
    step = 1e-6  # small: a relu's kink must not lie within it
    measured = (8 * (value(step) - value(-step)) - (value(2 * step) - value(-2 * step))) / (12 * step)
    assert abs(float(slope - measured)) < 1e-6 * max(1.0, abs(float(measured))), names


def test_compiles(few):
    """torch.compile(fullgraph) gives the eager output and gradients."""
    compare_compiled(few, padded=False)


@only(lambda name, config: config == type(config).tiny())
def test_padding_compiles(few):
    """Padding stays a tensor in the graph."""
    compare_compiled(few, padded=True)


def compare_compiled(few, padded):
    config = few[1]
    module = module_of(few)
    x = draw(2, 5, config.hidden_size)
    call = {}
    if padded:
        call["padding"] = torch.ones(2, 5, dtype=torch.bool)
        call["padding"][0, :2] = False
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=False)
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    want, found = module(a, **call), compiled(b, **call)
    assert_close(found.detach(), want.detach(), "compiled output", 1e-11)
    want.pow(2).sum().backward()
    found.pow(2).sum().backward()
    assert_close(b.grad, a.grad, "compiled gradient", 1e-11)


def test_built_on_meta_then_initialised(spec):
    """On the meta device, to_empty, reset_parameters gives what a plain build gives, seed for seed."""
    name, config = spec
    plain = hl.attention(name, **config.to_dict())
    with torch.device("meta"):
        module = hl.attention(name, **config.to_dict())
    assert all(p.is_meta for p in module.parameters())
    module.to_empty(device="cpu")
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(float("nan"))
    for either in (plain, module):
        torch.manual_seed(5)
        either.reset_parameters()
    for (n, a), (_, b) in zip(module.named_parameters(), plain.named_parameters(), strict=True):
        assert torch.isfinite(a).all() and torch.equal(a, b), n
    assert torch.isfinite(module(draw(2, 5, config.hidden_size).float())).all()


@only(lambda name, config: getattr(config, "init", None) != "paper")  # which is of the base too
def test_reset_heads_leaves_the_projections(spec):
    module = module_of(spec, torch.float32)
    bare = type("Bare", (type(module),), {"build_heads": lambda self: None, "reset_heads": lambda self: None})
    base = {n for n, _ in bare(module.config).named_parameters()}
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    module.reset_heads()
    for n, p in module.named_parameters():
        if n in base:
            assert torch.equal(p, before[n]), f"{n} changed"
        elif p.numel() > 1 and p.dim() > 1:
            assert not torch.equal(p, before[n]), f"{n} was not initialised"


def test_pictures_name_every_cell_of_weights_that_exist(spec):
    attn = module_of(spec)
    weights = attn.state_dict()
    for picture in attn.pictures():
        assert weights[picture.weight].numel() == len(picture.rows) * len(picture.columns), picture.weight
        assert len(set(picture.rows)) == len(picture.rows) and len(set(picture.columns)) == len(picture.columns)
    if any(isinstance(module, Mix) for module in attn.modules()):
        assert attn.pictures()


def test_no_decay_names_exist(spec):
    module = module_of(spec)
    names = list(module.no_decay())
    assert len(set(names)) == len(names)
    assert set(names) <= {n for n, _ in module.named_parameters()}
    assert {n for n, _ in module.named_parameters() if "_mix" in n} <= set(names)


def test_inputs_are_left_alone(spec):
    config = spec[1]
    module = module_of(spec)
    x = draw(2, 5, config.hidden_size)
    kept, state = x.clone(), {n: t.clone() for n, t in module.state_dict().items()}
    real, documents, positions = (
        torch.ones(2, 5, dtype=torch.bool),
        torch.zeros(2, 5, dtype=torch.long),
        torch.arange(5),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(x, padding=real, documents=documents, positions=positions)
    assert torch.equal(x, kept) and real.all() and (documents == 0).all() and torch.equal(positions, torch.arange(5))
    assert all(torch.equal(t, state[n]) for n, t in module.state_dict().items())


@given(data=st.data())
def test_maps_rows_sum_to_one(mechanism, data):
    """Every pattern is a distribution over the visible keys (softmax and hard), or its rows sum to what the mechanism
    says; zero where nothing is seen."""
    config, real = data.draw(configs(mechanism, lambda config: config.score != "identity")), data.draw(paddings(2, 5))
    module, x = module_of((mechanism, config)), draw(2, 5, config.hidden_size)
    patterns = module.maps(x, padding=real).patterns.detach()
    times = patterns.shape[-1] // 5  # rows of a token
    patterns = patterns.reshape(2, -1, 5 * times, 5 * times)
    sums = patterns.sum(-1)
    live = real.repeat_interleave(times, 1)[:, None].expand_as(sums)
    said = module.row_sums()
    wanted = torch.ones_like(sums) if said is None else said.detach()[None, :, None].expand_as(sums)
    assert (sums[live] - wanted[live]).abs().max() < max(1e-12, module.row_slack) and (sums[~live] == 0).all()
    assert said is not None or (patterns >= 0).all()
    padding = ~real.repeat_interleave(times, 1)[:, None, None].expand_as(patterns)
    assert (patterns[padding] == 0).all()


@examples(0.5)
@given(data=st.data())
def test_cost_is_measured_from_the_module(mechanism, data):
    """Parameters are the module's; cache elements its slots'; parts add up; exact counts never exceed full."""
    config = data.draw(configs(mechanism))
    options = config.to_dict()
    cost = hl.cost(mechanism, tokens=16, **options)
    module = hl.attention(mechanism, **options)
    assert cost.parameters == sum(p.numel() for p in module.parameters())
    assert cost.cache_elements_per_token == sum(heads * width for heads, width in module.cache_slots().values())
    constant = sum(heads * rows * width for heads, rows, width in module.constant_slots().values())
    assert cost.cache_bytes_per_token == 4 * cost.cache_elements_per_token
    assert cost.cache_constant_elements == constant and cost.cache_constant_bytes == 4 * constant
    assert 0 < cost.flops_exact <= cost.flops_full
    doubled = hl.cost(mechanism, tokens=16, dtype="bfloat16", **options)
    assert doubled.cache_bytes_per_token == 2 * doubled.cache_elements_per_token
    assert json.dumps(cost.to_dict())
