"""Who sees whom, for every mechanism with several of its options: causality, windows, padding, packing, dead rows."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.common import Row
from oracles.compare import assert_close, draw
from oracles.modules import influence, module_of
from oracles.strategies import LOOKS_BACK, allowed, calls, configs, examples, masks, paddings

import headloom as hl


def shows(config):
    """Rounded and winner-takes-all numbers have no gradients that show who is seen."""
    return config.projection != "bit" and config.score != "hard"


@examples(2)
@given(data=st.data())
def test_influence_is_exactly_visibility(mechanism, data):
    """Output t moves with token n if and only if t sees n, whatever is told of them."""
    config, call = data.draw(configs(mechanism, shows)), data.draw(calls())
    mask = data.draw(masks(call.batch, call.tokens, backwards=mechanism in LOOKS_BACK))
    module = module_of((mechanism, config), spread=0.25)  # moderate logits: no weight is too small for its gradient
    found = influence(module, draw(call.batch, call.tokens, config.hidden_size), mask=mask, **call.sides)
    index, pairs = range(call.tokens), allowed(mask, call.tokens).expand(call.batch, -1, -1)
    for b in range(call.batch):
        row = Row(call.tokens, config, **call.row(b))
        # with window 1 the softmax over one key is constant, and the output still moves with its value
        wanted = torch.tensor([[row.sees(t, n) for n in index] for t in index]) & pairs[b]
        if mechanism in LOOKS_BACK:  # what a token leaves behind holds what it has seen itself
            for _ in range(3):
                wanted = (wanted.double() @ wanted.double()) > 0
        assert torch.equal(found[b], wanted), f"row {b}:\n{found[b].int()}\nwanted\n{wanted.int()}"


@given(data=st.data())
def test_a_later_token_cannot_move_an_earlier_output(mechanism, data):
    """By value, so for rounded and winner-takes-all numbers too; whatever kind of mask comes besides."""
    config = data.draw(configs(mechanism, lambda config: config.causal))
    module, x = module_of((mechanism, config)), draw(2, 6, config.hidden_size)
    changed = x.clone()
    changed[:, -1] += 3
    real = torch.ones(2, 6, dtype=torch.bool)
    everything = hl.Dense(torch.ones(2, 6, 6, dtype=torch.bool))
    kinds = [{}, {"padding": real}, {"mask": hl.Padding(real)}, {"mask": everything}, {"mask": hl.Window(4)}]
    call = data.draw(st.sampled_from(kinds))
    a, b = module(x, **call), module(changed, **call)
    assert (a[:, :-1] - b[:, :-1]).abs().max() < 1e-13
    assert (a[:, -1] - b[:, -1]).abs().max() > 1e-6


@given(data=st.data())
def test_a_mask_never_loosens_the_config(mechanism, data):
    """mask=Causal(), Window or an all-true Dense adds restrictions to the config's own and removes none."""
    config = data.draw(configs(mechanism))
    module, x = module_of((mechanism, config)), draw(2, 5, config.hidden_size)
    kinds = [hl.Window(9), hl.Dense(torch.ones(1, 5, 5, dtype=torch.bool))]
    mask = data.draw(st.sampled_from([*kinds, hl.Causal()] if config.causal else kinds))
    assert_close(module(x, mask=mask).detach(), module(x).detach(), f"{mask}", 1e-12)


@examples(2)
@given(data=st.data())
def test_a_document_is_what_it_is_alone(mechanism, data):
    """In any row of a batch, among other documents and padding with anything in it; told by padding and document ids,
    masks of them, or positions that start again."""
    config = data.draw(configs(mechanism))
    module = module_of((mechanism, config))
    parts = data.draw(
        st.lists(
            st.lists(st.tuples(st.integers(1, 4), st.sampled_from([True, True, False])), min_size=1, max_size=3),
            min_size=1,
            max_size=2,
        )
    )
    T = max(sum(size for size, _ in row) for row in parts)
    rows = [[*row, (T - sum(size for size, _ in row), False)] for row in parts]  # padded on the right
    padding = torch.tensor([[real for size, real in row for _ in range(size)] for row in rows])
    documents = torch.tensor([[i for i, (size, _) in enumerate(row) for _ in range(size)] for row in rows])
    positions = torch.tensor([[i for size, _ in row for i in range(size)] for row in rows])
    told = data.draw(st.sampled_from(["documents", "mask", "positions"]))
    call = {
        "documents": {"padding": padding, "documents": documents},
        "mask": {"mask": hl.Padding(padding) & hl.Documents(documents)},
        "positions": {"padding": padding, "positions": positions},
    }[told]
    if padding.all() and told != "mask" and data.draw(st.booleans()):
        del call["padding"]
    x = draw(len(rows), T, config.hidden_size)
    x[~padding] *= data.draw(st.sampled_from([1.0, 1e6]))
    out = module(x, **call).detach()
    # the last bit of a sum may move one 8-bit rounding
    tolerance = 1e-11 if config.projection == "linear" else 1e-2
    for b, row in enumerate(rows):
        start = 0
        for size, real in row:
            part = slice(start, start := start + size)
            if size and real:
                assert_close(out[b, part], module(x[b : b + 1, part]).detach()[0], "alone", tolerance)
            elif size and not config.out_bias:  # which is added after attention
                assert (out[b, part] == 0).all()


def unbiased(config):
    """The bias of the output is added after attention."""
    return not config.out_bias


@given(data=st.data())
def test_dead_rows_are_zero_with_finite_gradients(mechanism, data):
    """A padded query, a wholly padded row and a row masked out by pairs return exactly 0; padding gets no gradient."""
    config = data.draw(configs(mechanism, unbiased))
    module, x = module_of((mechanism, config)), draw(2, 5, config.hidden_size).requires_grad_()
    real = data.draw(paddings(2, 5))
    pairs = torch.ones(1, 5, 5, dtype=torch.bool)
    pairs[0, 3] = False
    kinds = [({"padding": real}, ~real), ({"mask": hl.Padding(real)}, ~real)]
    kinds += [({"mask": hl.Dense(pairs)}, (torch.arange(5) == 3).expand(2, -1))]
    call, dead = data.draw(st.sampled_from(kinds))
    out = module(x, **call)
    assert (out[dead] == 0).all() and (out[~dead].abs().sum(-1) > 0).all()
    gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()], allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in gradients)
    assert "mask" in call or (gradients[0][dead] == 0).all()


@given(data=st.data())
def test_dead_rows_in_low_precision(mechanism, data):
    config = data.draw(configs(mechanism))
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    module = module_of((mechanism, config), dtype)
    x, real = draw(2, 5, config.hidden_size).to(dtype).requires_grad_(), data.draw(paddings(2, 5))
    out = module(x, padding=real)
    assert config.out_bias or (out[~real] == 0).all()
    out.float().pow(2).sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in module.parameters())
