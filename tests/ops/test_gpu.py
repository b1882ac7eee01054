"""Attention by a GPU's kernels: on a CPU by the same calls, unfused; on a GPU, where there is one, in its own types."""

import itertools

import pytest
import torch
from oracles.scores import ROWS, draw, gradients, pairs, reference
from torch.nn.attention import flex_attention

import headloom as hl
from headloom.ops import gpu, scores
from headloom.ops.masks import Visibility

# what PyTorch's own compiler does to tensors and functions
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning"),
]
CASES = list(itertools.product((None, 1, 3, 8), ((1, False), (2, False), (2, True), (3, True)), (True, False)))


@pytest.fixture
def forced(monkeypatch):
    """A CPU's tensors take the GPU's way; flex attention, which trains on GPUs only, runs its plain form."""
    monkeypatch.setattr(gpu, "takes", lambda q: True)
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})
    with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
        yield
    torch.compiler.reset()


def attended(inputs, where, P, rows_causal):
    with scores.paths() as ran:
        out = scores.attend(*inputs, where, scale=0.7, rows_per_token=P, rows_causal=rows_causal)
    return out, next(iter(ran))


def check(inputs, T, S, causal, window, P, rows_causal, rows=None, *, tolerance):
    documents = None if rows is None else torch.tensor(rows)
    found, path = attended(inputs, Visibility(T, S, causal, window, documents), P, rows_causal)
    seen = pairs(T, S, causal, window, P, rows_causal, rows)
    want = reference(*inputs, seen, 0.7)
    assert (found.transpose(1, 2)[~seen.any(-1)] == 0).all()
    torch.testing.assert_close(found, want, atol=tolerance, rtol=tolerance)
    for a, b in zip(gradients(found, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=5 * tolerance, rtol=5 * tolerance)
    return path


def test_structure_by_sdpa(forced):
    for T, S in ((1, 23), (7, 7), (5, 23)):
        for window, (P, rows_causal), causal in CASES:
            inputs = draw(T, S, P, (6, 6 if P < 3 else 19))
            assert check(inputs, T, S, causal, window, P, rows_causal and causal, tolerance=1e-10) == "sdpa"


@pytest.mark.parametrize("kind", ROWS)
def test_documents_and_padding_by_sdpa(kind, forced):
    for T, causal, window, P in itertools.product((2, 19), (True, False), (None, 4), (1, 2)):
        inputs = draw(T, 19, P)
        assert check(inputs, T, 19, causal, window, P, causal and P > 1, ROWS[kind], tolerance=1e-10) == "sdpa"


@pytest.mark.parametrize(
    ("T", "S", "causal", "window", "P", "rows_causal", "kind"),
    [
        (5, 23, True, None, 1, False, None),
        (5, 23, True, 3, 2, True, None),
        (7, 7, True, None, 3, False, None),
        (7, 7, False, 3, 2, False, None),
        (5, 23, False, None, 2, True, None),
        (1, 23, True, 8, 2, True, None),
        (19, 19, True, 4, 2, False, "packed"),
        (3, 19, True, None, 2, True, "alternating"),
        (19, 19, False, None, 1, False, "left"),
    ],
)
def test_flex(T, S, causal, window, P, rows_causal, kind, forced, monkeypatch):
    monkeypatch.setattr(gpu, "FEW", 0)
    inputs = draw(T, S, P, (6, 6 if P < 3 else 19))
    assert check(inputs, T, S, causal, window, P, rows_causal, ROWS.get(kind), tolerance=1e-10) == "flex"


def test_what_needs_no_mask(forced, monkeypatch):
    monkeypatch.setattr(gpu, "FEW", 0)
    for T, S, causal, window, P, rows_causal in (
        (7, 7, True, None, 1, False),
        (7, 7, True, 7, 2, True),
        (1, 9, True, 9, 3, False),
        (4, 9, False, None, 2, False),
    ):
        assert check(draw(T, S, P), T, S, causal, window, P, rows_causal, tolerance=1e-10) == "sdpa"


@pytest.mark.parametrize("few", [0, 1 << 22], ids=["flex", "sdpa"])
def test_documents_that_all_sequences_share(few, forced, monkeypatch):
    monkeypatch.setattr(gpu, "FEW", few)
    inputs, rows = draw(19, 19, 1), [ROWS["packed"][0]]
    out, _ = attended(inputs, Visibility(19, 19, True, None, torch.tensor(rows)), 1, False)
    want = reference(*inputs, pairs(19, 19, True, None, 1, False, rows * 2), 0.7)
    torch.testing.assert_close(out, want, atol=1e-12, rtol=0)


@pytest.mark.parametrize("few", [0, 1 << 22], ids=["flex", "sdpa"])
def test_pairs_and_heads_in_threes(few, forced, monkeypatch):
    """A mask for each sequence and one for both, with a row that sees nothing; six heads on two, unequal widths."""
    monkeypatch.setattr(gpu, "FEW", few)
    q, k, v = draw(5, 9, 1, (6, 3), H=6)
    for batch in (2, 1):
        seen = torch.rand(batch, 5, 9, generator=torch.Generator().manual_seed(batch)) > 0.5
        seen[:, 2] = False
        out, _ = attended((q, k, v), Visibility(5, 9, False, None, None, seen), 1, False)
        want = reference(q, k, v, seen.expand(2, 5, 9), 0.7)
        torch.testing.assert_close(out, want, atol=1e-12, rtol=0)
        for a, b in zip(gradients(out, (q, k, v)), gradients(want, (q, k, v)), strict=True):
            torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


@pytest.mark.parametrize("P", [1, 2, 3])
@pytest.mark.parametrize(("T", "S", "window"), [(300, 300, None), (300, 300, 40), (70, 333, 100), (256, 256, 128)])
def test_blocks_are_those_that_show_something(T, S, window, P):
    """The strips give the block lists that PyTorch makes of the whole mask; a window's do not grow with the context."""
    documents = torch.arange(S)[None] // torch.tensor([[100], [64]])
    for rows_causal, given in itertools.product((False, True), (None, documents)):
        where = Visibility(T, S, True, window, given)
        found = gpu._block_mask(where, 2, P, rows_causal and P > 1, torch.device("cpu"))
        predicate = gpu._predicate(where, P, rows_causal and P > 1)
        want = flex_attention.create_block_mask(predicate, None if given is None else 2, None, T * P, S * P, "cpu", 128)
        for name in ("kv_num_blocks", "full_kv_num_blocks", "q_num_blocks", "full_q_num_blocks"):
            torch.testing.assert_close(getattr(found, name), getattr(want, name), msg=name)
        assert torch.equal(found.to_dense(), want.to_dense())
    if window == 40 and P == 1:
        assert int(found.kv_num_blocks.max()) <= 2


def test_block_masks_are_shared_and_follow_their_documents(monkeypatch):
    built = []
    make = gpu._built
    monkeypatch.setattr(gpu, "_built", lambda *args: built.append(1) or make(*args))
    documents = torch.zeros(1, 200, dtype=torch.long)
    where = Visibility(200, 200, True, None, documents)
    masks = [gpu._block_mask(where, 1, 1, False, documents.device) for _ in range(3)]
    assert len(built) == 1 and masks[0] is masks[2]
    documents[:, 128:] = 1
    changed = gpu._block_mask(where, 1, 1, False, documents.device)
    assert len(built) == 2 and int(changed.to_dense().sum()) == 2 and int(masks[0].to_dense().sum()) == 3


@pytest.mark.parametrize("spec", ["gqa", "iha", "sas", "mla", "tpa"])
def test_layers_give_the_same_by_either_way(spec, forced, monkeypatch):
    """Whole layers in float64, with padding, a window and a cache, forward and backward."""
    attention = hl.attention(spec, hidden_size=32, num_heads=4, window=5).double()
    x = torch.randn(2, 12, 32, dtype=torch.float64, requires_grad=True)
    real = torch.arange(12) >= torch.tensor([[3], [0]])

    def run():
        cache = hl.Cache()
        outs = [attention(x, padding=real), attention(x[:, :7], cache=cache), attention(x[:, 7:], cache=cache)]
        return [*outs, *torch.autograd.grad(sum(out.square().sum() for out in outs), (x, *attention.parameters()))]

    for few in (0, 1 << 22):
        monkeypatch.setattr(gpu, "FEW", few)
        with scores.paths() as ran:
            found = run()
        assert set(ran) - {"factors"} == {"sdpa" if few else "flex"}
        with monkeypatch.context() as usual:
            usual.setattr(gpu, "takes", lambda q: False)
            want = run()
        for a, b in zip(found, want, strict=True):
            torch.testing.assert_close(a, b, atol=1e-9, rtol=1e-9)


def test_soft_capped_scores(forced, monkeypatch):
    monkeypatch.setattr(gpu, "FEW", 0)
    inputs, where = draw(5, 23, 2), Visibility(5, 23, True, 8)
    with scores.paths() as ran:
        found = scores.attend(*inputs, where, scale=3.0, rows_per_token=2, rows_causal=True, softcap=1.5)
    monkeypatch.setattr(gpu, "takes", lambda q: False)
    want = scores.attend(*inputs, where, scale=3.0, rows_per_token=2, rows_causal=True, softcap=1.5)
    assert dict(ran) == {"flex": 1}
    torch.testing.assert_close(found, want, atol=1e-12, rtol=0)
    for a, b in zip(gradients(found, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=1e-11, rtol=0)


def test_flex_is_part_of_a_compiled_graph(forced, monkeypatch):
    monkeypatch.setattr(gpu, "FEW", 0)
    q, k, v = (x.detach() for x in draw(40, 40, 2))

    def call(q, k, v, documents):
        one = scores.attend(q, k, v, Visibility(40, 40, True, 9), scale=0.7, rows_per_token=2)
        return one + scores.attend(q, k, v, Visibility(40, 40, True, None, documents), scale=0.7, rows_per_token=2)

    documents = torch.arange(40)[None] // torch.tensor([[10], [15]])
    found = torch.compile(call, fullgraph=True, backend="eager")(q, k, v, documents)
    torch.testing.assert_close(found, call(q, k, v, documents))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-3), (torch.bfloat16, 5e-2)])
def test_on_a_gpu(dtype, tolerance, monkeypatch):
    """The kernels themselves, against float64 on the CPU; a window's memory does not grow with the square."""
    cases = [(300, 300, None, 1, False), (150, 150, 33, 2, True), (150, 150, None, 2, False), (70, 200, 50, 1, False)]
    for few, (T, S, window, P, rows_causal) in itertools.product((0, 1 << 22), cases):
        monkeypatch.setattr(gpu, "FEW", few)
        inputs = [x.detach().to(dtype).double().requires_grad_() for x in draw(T, S, P, (32, 32))]
        given = [x.detach().to("cuda", dtype).requires_grad_() for x in inputs]
        found, _ = attended(given, Visibility(T, S, True, window), P, rows_causal)
        want = reference(*inputs, pairs(T, S, True, window, P, rows_causal), 0.7)
        torch.testing.assert_close(found.cpu().double(), want, atol=tolerance, rtol=tolerance)
        for a, b in zip(gradients(found, given), gradients(want, inputs), strict=True):
            torch.testing.assert_close(a.cpu().double(), b, atol=5 * tolerance, rtol=5 * tolerance)
    long = [torch.randn(1, 4, 1 << 16, 64, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3)]
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    out, path = attended(long, Visibility(1 << 16, 1 << 16, True, 256), 1, False)
    torch.autograd.grad(out.sum(), long)
    assert path == "flex" and torch.cuda.max_memory_allocated() - before < 1 << 31
