"""`attend` on every path against plain softmax attention: fused and direct kernels, blocks, masks; with gradients."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracles.scores import ROWS, draw, gradients, pairs, reference

from headloom.ops import blocks, fused, scores
from headloom.ops.masks import Visibility

LENGTHS = [(1, 1), (1, 23), (7, 7), (5, 23), (29, 29)]


def check(T, S, causal, window, P, rows_causal, rows=None, *, path, widths=(6, 6)):
    inputs = draw(T, S, P, widths)
    documents = None if rows is None else torch.tensor(rows)
    with scores.paths() as ran:
        found = scores.attend(
            *inputs, Visibility(T, S, causal, window, documents), scale=0.7, rows_per_token=P, rows_causal=rows_causal
        )
    assert dict(ran) == {path: 1}
    want = reference(*inputs, pairs(T, S, causal, window, P, rows_causal, rows), 0.7)
    dead = ~pairs(T, S, causal, window, P, rows_causal, rows).any(-1)
    assert (found.transpose(1, 2)[dead] == 0).all()
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    for a, b in zip(gradients(found, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.fixture(params=[0, 4, 10**6], ids=["fused", "either", "direct"], autouse=True)
def kernel(request, monkeypatch):
    """The fused kernel for every rectangle, for all but the smallest, and for none."""
    monkeypatch.setattr(fused, "SMALL", request.param)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("T", "S"), LENGTHS)
def test_structure(T, S, causal):
    for window, (P, rows_causal) in itertools.product((None, 1, 3, 8), ((1, False), (2, False), (3, causal))):
        check(T, S, causal, window, P, rows_causal, path="fused")


@pytest.mark.parametrize("T", [2, 19])
@pytest.mark.parametrize("kind", ROWS)
def test_documents_and_padding(kind, T):
    path = "masked" if kind == "alternating" else "fused"
    for causal, window in itertools.product((True, False), (None, 4)):
        for P, rows_causal in ((1, False), (2, causal)):
            check(T, 19, causal, window, P, rows_causal, ROWS[kind], path=path)


def test_order_within_a_token_without_causality():
    """A mask that replaces causality leaves the virtual order of a token's own pseudo-tokens."""
    for T, window in itertools.product((1, 5, 19), (None, 4)):
        check(T, 19, False, window, 3, True, path="masked")


@pytest.mark.parametrize("elements", [1, 200, 1 << 22])
def test_masked_blocks(elements, monkeypatch):
    """Query blocks of any size, with past, window, documents: what a dense mask says."""
    monkeypatch.setattr(scores, "_BIAS_ELEMENTS", elements)
    for T, causal, window, P in itertools.product((3, 19), (True, False), (None, 4), (1, 2)):
        check(T, 19, causal, window, P, causal and P > 1, ROWS["alternating"], path="masked")


@pytest.mark.parametrize("widths", [(5, 3), (3, 8)])
def test_unequal_widths_stay_fused(widths):
    check(7, 7, True, 3, 2, False, path="fused", widths=widths)
    check(19, 19, True, None, 1, False, ROWS["alternating"], path="masked", widths=widths)


@pytest.mark.parametrize("elements", [1, 500, 1 << 24])
@pytest.mark.parametrize("rows", [None, ROWS["left"], ROWS["alternating"]], ids=["none", "left", "alternating"])
def test_blocks_of_any_size(elements, rows, monkeypatch):
    """The materialised path equals the fused one, forward and backward, however it is cut."""
    monkeypatch.setattr(blocks, "_BLOCK_ELEMENTS", elements)
    documents = None if rows is None else torch.tensor(rows)
    for T, causal, window, P in itertools.product((3, 19), (True, False), (None, 4), (1, 2)):
        inputs, rows_causal = draw(T, 19, P), causal and P > 1
        where = Visibility(T, 19, causal, window, documents)
        want = scores.attend(*inputs, where, scale=0.7, rows_per_token=P, rows_causal=rows_causal)
        with scores.paths() as ran:
            found = scores.attend(*inputs, where, scale=0.7, rows_per_token=P, rows_causal=rows_causal, softcap=1e7)
        assert dict(ran) == {"blocks": 1}
        torch.testing.assert_close(found, want, atol=1e-11, rtol=0)
        for a, b in zip(gradients(found, inputs), gradients(want, inputs), strict=True):
            torch.testing.assert_close(a, b, atol=1e-10, rtol=0)


def test_dead_row():
    """Boolean mask [[T, F], [F, F]]: the dead row exactly 0, gradients finite, the live row v[0]."""
    q, k, v = (torch.randn(1, 1, 2, 4, requires_grad=True) for _ in range(3))
    seen = torch.tensor([[[True, False], [False, False]]])
    for softcap in (None, 30.0):
        out = scores.attend(q, k, v, Visibility(2, 2, False, None, None, seen), scale=0.5, softcap=softcap)
        assert (out[0, 0, 1] == 0).all() and torch.equal(out[0, 0, 0], v[0, 0, 0])
        grads = torch.autograd.grad(out.sum(), (q, k, v))
        assert all(torch.isfinite(g).all() for g in grads)
        assert torch.equal(grads[2][0, 0], torch.tensor([[1.0] * 4, [0.0] * 4]))


def plainly(q, k, v, *, attn_mask, scale):
    return torch.softmax((q @ k.transpose(-1, -2) * scale).masked_fill(~attn_mask, -torch.inf), -1) @ v


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("window", "P", "rows_causal"), [(None, 1, False), (None, 3, False), (None, 3, True), (5, 2, False)]
)
def test_low_precision(dtype, window, P, rows_causal):
    """Value and gradient errors against float64 within twice (root mean square; the largest one within four times)
    those of the worse of two independent runs in the low precision."""
    T = 37
    inputs, seen = draw(T, T, P, dtype=dtype), pairs(T, T, True, window, P, rows_causal)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs]
    exact = reference(*exact_inputs, seen, 0.4)
    exact = [exact, *gradients(exact, exact_inputs)]
    runs = []
    for independent in (plainly, F.scaled_dot_product_attention):
        low = [x.detach().clone().requires_grad_() for x in inputs]
        wide = [low[0], *(x.repeat_interleave(2, 1) for x in low[1:])]
        out = independent(*wide, attn_mask=seen[:, None], scale=0.4)
        runs.append([out, *gradients(out, low)])
    ours = scores.attend(*inputs, Visibility(T, T, True, window), scale=0.4, rows_per_token=P, rows_causal=rows_causal)
    assert ours.dtype == dtype
    for name, found, *others, right in zip("oqkv", [ours, *gradients(ours, inputs)], *runs, exact, strict=True):
        for size, times in ((lambda x: x.pow(2).mean().sqrt(), 2), (lambda x: x.abs().max(), 4)):
            error, *errors = (size(x.detach().double() - right.detach()) for x in (found, *others))
            assert error <= times * max(errors), f"{name}: {error:.2e} against {max(errors):.2e}"


def test_large_logits_stay_finite():
    """Scores of 1e4 and rows that differ by as much: no overflow in merging pieces."""
    q, k, v = (x.detach().float() * 100 for x in draw(19, 19, 2))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = scores.attend(q, k, v, Visibility(19, 19, True, 4), scale=1.0, rows_per_token=2, rows_causal=False)
    want = reference(*(x.double() for x in (q, k, v)), pairs(19, 19, True, 4, 2, False), 1.0)
    assert torch.isfinite(out).all() and (out - want).abs().max() < 1e-3 * float(want.detach().abs().max())
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_the_fused_operators_schema():
    """The ATen operator is not public: a change of its signature must be seen here first."""
    forward = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema)
    assert forward.endswith(
        "(Tensor query, Tensor key, Tensor value, float dropout_p=0., bool is_causal=False, *, "
        "Tensor? attn_mask=None, float? scale=None) -> (Tensor output, Tensor logsumexp)"
    )
    backward = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default._schema)
    assert backward.endswith(
        "(Tensor grad_out, Tensor query, Tensor key, Tensor value, Tensor out, Tensor logsumexp, float dropout_p, "
        "bool is_causal, *, Tensor? attn_mask=None, float? scale=None) -> (Tensor grad_query, Tensor grad_key, "
        "Tensor grad_value)"
    )


def test_empty_calls_do_not_kill_the_process():
    q, k, v = (torch.zeros(2, 4, 0, 6) for _ in range(3))
    assert scores.attend(q, k, v, Visibility(0, 0), scale=1.0).shape == (2, 4, 0, 6)
