"""Mixed heads scored against what they are mixed from: what mixing first gives, forward and backward."""

import pytest
import torch

from headloom.ops import absorbed, blocks
from headloom.ops.masks import Visibility
from headloom.ops.scores import paths

B, H, G, P, K, V, S = 2, 4, 2, 3, 6, 5, 11
ROWS = torch.tensor([[-1, -1] + [0] * 9, [0] * 6 + [1] * 5])


def draw(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("documents", [None, ROWS], ids=["plain", "documents"])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("rows_causal", [True, False])
@pytest.mark.parametrize("T", [1, 3])
@pytest.mark.parametrize("options", [{}, {"kind": "hard"}, {"softcap": 2.0}, {"kind": "identity"}], ids=str)
def test_equals_mixing_first(T, rows_causal, window, documents, options):
    torch.manual_seed(T)
    options = {"kind": "softmax", "softcap": None, "dropout": 0.0, **options}
    inputs = q, k, v, k_mix, v_mix = (
        draw(B, H, T, P, P, K), draw(B, G, S, K), draw(B, G, S, V), draw(H, P, G), draw(H, P, G),
    )  # fmt: skip
    seen = Visibility(T, S, True, window, documents)
    with paths() as ran:
        found = absorbed.attend(*inputs, seen, scale=0.4, rows_causal=rows_causal, **options)
    assert dict(ran) == {"absorbed": 1}
    # one turn per pseudo-key, by hand: every pseudo-key meets its own version of the queries
    mixed = [torch.einsum("hpg,bgsx->bhspx", mix, x).flatten(2, 3) for mix, x in ((k_mix, k), (v_mix, v))]
    versions = q.unsqueeze(4).expand(-1, -1, -1, -1, S, -1, -1)
    logits = torch.einsum("bhtpsqk,bhsqk->bhtpsq", versions, mixed[0].unflatten(2, (S, P))) * 0.4
    if options["softcap"]:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    visible = seen.dense()[:, :, None, :, None].expand(-1, -1, P, -1, P).clone()
    for t in range(T if rows_causal else 0):
        for p in range(P):
            visible[:, t, p, S - T + t, p + 1 :] = False
    hidden = ~visible.flatten(1, 2).flatten(2)[:, None]
    weights = blocks.normalise(logits.flatten(2, 3).flatten(3), hidden, options["kind"], True)
    want = weights @ mixed[1]
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    cotangent = torch.randn_like(found)
    learned = inputs if options["kind"] != "hard" else (v, v_mix)
    for a, b in zip(*(torch.autograd.grad(x, learned, cotangent) for x in (found, want)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)
