"""Who sees whom, for every mechanism: causality, windows, padding, packing, dead rows."""

import pytest
import torch
from oracles.common import Row
from oracles.compare import assert_close, draw, sides
from oracles.modules import influence, module_of
from oracles.variations import only

import headloom as hl
from headloom.mechanism import Attention

KINDS = ["plain", "left", "right", "holes", "documents", "alternating", "restart", "padded_documents", "documents_win"]


# rounded or winner-takes-all numbers: gradients do not show who is seen
@only(lambda name, config: config.projection != "bit" and config.score != "hard")
@pytest.mark.parametrize("kind", KINDS)
def test_influence_is_exactly_visibility(spec, kind):
    """Output t moves with token n if and only if t sees n (cases 3, 4, 6, 10, 20; causality both ways)."""
    config = spec[1]
    side = sides(kind)
    module = module_of(spec)
    found = influence(module, draw(2, 5, config.hidden_size), **side)
    for b in range(2):
        row = Row(
            5, config, *(None if side.get(k) is None else side[k][b] for k in ("positions", "padding", "documents"))
        )
        # a query always reads itself when it is real; with window 1 softmax over one key still moves with its value
        wanted = torch.tensor([[row.sees(t, n) for n in range(5)] for t in range(5)])
        if type(module).remember is not Attention.remember:  # what a token leaves behind holds what it has seen itself
            for _ in range(3):
                wanted = (wanted.double() @ wanted.double()) > 0
        assert torch.equal(found[b], wanted), f"row {b}:\n{found[b].int()}\nwanted\n{wanted.int()}"


def test_a_later_token_cannot_move_an_earlier_output(causal):
    """Case 4, by value: bit-equal outputs before the changed token, for no mask, padding, a 2-D and a 3-D mask."""
    config = causal[1]
    module = module_of(causal)
    x = draw(2, 7, config.hidden_size)
    changed = x.clone()
    changed[:, -1] += 3
    real = torch.ones(2, 7, dtype=torch.bool)
    calls = [
        {},
        {"padding": real},
        {"mask": hl.Padding(real)},
        {"mask": hl.Dense(torch.ones(2, 7, 7, dtype=torch.bool))},
    ]
    for call in calls:
        a, b = module(x, **call), module(changed, **call)
        assert (a[:, :-1] - b[:, :-1]).abs().max() < 1e-13
        assert (a[:, -1] - b[:, -1]).abs().max() > 1e-6


def test_a_mask_never_loosens_the_config(spec):
    """mask=Causal(), Window or an all-true Dense adds restrictions to the config's own and removes none."""
    config = spec[1]
    module = module_of(spec)
    x = draw(2, 5, config.hidden_size)
    want = module(x).detach()
    assert_close(module(x, mask=hl.Window(9)).detach(), want, "a wider window", 1e-12)
    assert_close(module(x, mask=hl.Dense(torch.ones(1, 5, 5, dtype=torch.bool))).detach(), want, "all-true", 1e-12)
    if config.causal:
        assert_close(module(x, mask=hl.Causal()).detach(), want, "causal twice", 1e-12)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_invariance(spec, side):
    """Case 17: a short row padded on either side gives what it gives alone, and zeros at the padding."""
    config = spec[1]
    module = module_of(spec)
    x = draw(2, 7, config.hidden_size)
    real = torch.ones(2, 7, dtype=torch.bool)
    part = slice(3, 7) if side == "left" else slice(0, 4)
    real[0] = False
    real[0, part] = True
    out = module(x, padding=real).detach()
    assert_close(out[0, part], module(x[:1, part]).detach()[0], "padded row", 1e-11)
    assert_close(out[1], module(x[1:]).detach()[0], "full row", 1e-11)
    noisy = x.clone()
    noisy[~real] = 1e6
    assert_close(module(noisy, padding=real).detach()[real], out[real], "content of the padding", 1e-11)


def test_packing_invariance(spec):
    """Documents, and the same told by restarting positions, give each document as it is alone."""
    config = spec[1]
    module = module_of(spec)
    x = draw(1, 7, config.hidden_size)
    alone = torch.cat([module(x[:, :3]), module(x[:, 3:5]), module(x[:, 5:])], dim=1).detach()
    documents = torch.tensor([[0, 0, 0, 1, 1, 2, 2]])
    positions = torch.tensor([[0, 1, 2, 0, 1, 0, 1]])
    assert_close(module(x, documents=documents).detach(), alone, "documents", 1e-11)
    assert_close(module(x, mask=hl.Documents(documents)).detach(), alone, "Documents mask", 1e-11)
    assert_close(module(x, positions=positions).detach(), alone, "restarts", 1e-11)
    assert_close(module(x, positions=positions[0]).detach(), alone, "restarts, one row for all", 1e-11)


@only(lambda name, config: not config.out_bias)  # which is added after attention
def test_dead_rows_are_zero_with_finite_gradients(spec):
    """Cases 1, 2 and 7: a padded query, a wholly padded row and a row masked out by pairs return exactly 0."""
    config = spec[1]
    module = module_of(spec)
    x = draw(3, 5, config.hidden_size).requires_grad_()
    real = torch.ones(3, 5, dtype=torch.bool)
    real[0, :2] = False
    real[1] = False
    pairs = torch.ones(1, 5, 5, dtype=torch.bool)
    pairs[0, 3] = False
    for call, dead in [
        ({"padding": real}, ~real),
        ({"mask": hl.Padding(real)}, ~real),
        ({"mask": hl.Dense(pairs)}, torch.tensor([[False, False, False, True, False]] * 3)),
    ]:
        out = module(x, **call)
        assert (out[dead] == 0).all() and (out[~dead].abs().sum(-1) > 0).all()
        gradients = torch.autograd.grad(out.sum(), [x, *module.parameters()], allow_unused=True)
        assert all(g is None or torch.isfinite(g).all() for g in gradients)
        if "padding" in call:
            assert (gradients[0][dead] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dead_rows_in_low_precision(spec, dtype):
    config = spec[1]
    module = module_of(spec, dtype)
    x = draw(2, 5, config.hidden_size).to(dtype).requires_grad_()
    real = torch.ones(2, 5, dtype=torch.bool)
    real[0, :3] = False
    out = module(x, padding=real)
    if not getattr(config, "out_bias", False):
        assert (out[0, :3] == 0).all()
    out.float().pow(2).sum().backward()
    assert torch.isfinite(out).all() and torch.isfinite(x.grad).all()
    assert all(p.grad is None or torch.isfinite(p.grad).all() for p in module.parameters())
