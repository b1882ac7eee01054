"""Every way to the same softmax(Q K^T) V, on anything: fused pieces, masked and materialised blocks however they are
cut, and flex attention's plain form agree with the definition, forward and backward."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.scores import draw, gradients, pairs, reference
from oracles.strategies import examples
from torch.nn.attention import flex_attention

from headloom.ops import blocks, fused, gpu, scores
from headloom.ops.masks import Visibility

# what PyTorch's own compiler does to tensors and functions
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:<class 'torch.autograd.function.Function'>:DeprecationWarning"),
]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: T queries, the last of S keys, with P rows a token."""

    T: int
    S: int
    P: int
    rows_causal: bool
    causal: bool
    window: int | None
    rows: list[list[int]] | None
    chosen: int | None
    heads: tuple[int, int]
    widths: tuple[int, int]

    @property
    def seen(self):
        """Visible pairs of rows, (2, T P, S P), by the definition."""
        found = pairs(self.T, self.S, self.causal, self.window, self.P, self.rows_causal, self.rows)
        chosen = self.pairs
        return found if chosen is None else found & chosen.repeat_interleave(self.P, 1).repeat_interleave(self.P, 2)

    @property
    def pairs(self):
        """A given mask over pairs of tokens, or None."""
        if self.chosen is None:
            return None
        generator = torch.Generator().manual_seed(self.chosen)
        return torch.rand(self.chosen % 2 + 1, self.T, self.S, generator=generator) > 0.4

    @property
    def visibility(self):
        documents = None if self.rows is None else torch.tensor(self.rows)
        return Visibility(self.T, self.S, self.causal, self.window, documents, self.pairs)


@st.composite
def cases(drawn):
    T, past, P = drawn(st.integers(1, 9)), drawn(st.sampled_from([0, 0, 1, 5, 12])), drawn(st.integers(1, 3))
    S = T + past
    row = st.lists(st.integers(-1, 2), min_size=S, max_size=S)
    runs = row.map(sorted)  # documents in runs, with padding on the left
    return Case(
        T,
        S,
        P,
        drawn(st.booleans()),
        drawn(st.booleans()),
        drawn(st.none() | st.integers(1, S + 1)),
        drawn(st.none() | st.lists(runs, min_size=2, max_size=2) | st.lists(row, min_size=2, max_size=2)),
        drawn(st.none() | st.integers(0, 99)),
        drawn(st.sampled_from([(4, 4), (4, 2), (6, 2), (3, 1)])),
        drawn(st.sampled_from([(6, 6), (5, 3), (3, 8)])),
    )


def agree(case, found, inputs, tolerance=1e-11):
    seen = case.seen
    want = reference(*inputs, seen, 0.7)
    assert (found.transpose(1, 2)[~seen.any(-1)] == 0).all()
    torch.testing.assert_close(found, want, atol=tolerance, rtol=0)
    for a, b in zip(gradients(found, inputs), gradients(want, inputs), strict=True):
        torch.testing.assert_close(a, b, atol=5 * tolerance, rtol=0)


def inputs_of(case):
    H, G = case.heads
    return draw(case.T, case.S, case.P, case.widths, H=H, G=G)


@examples(12)
@given(case=cases(), cut=st.sampled_from([1, 40, 1 << 22]), small=st.sampled_from([0, 4, 16]))
def test_pieces_and_masked_blocks(case, cut, small):
    """Pieces of few tiles and of one, by the fused kernel and by plain products; masked blocks of any size."""
    inputs, tile = inputs_of(case), 4 if cut == 40 else 512
    sizes = {fused: {"SMALL": small, "TILE": (tile, tile), "RESULTS": cut, "GRADIENTS": cut}}
    with pytest.MonkeyPatch.context() as patch:
        for module, values in {**sizes, scores: {"_BIAS_ELEMENTS": cut}}.items():
            for name, value in values.items():
                patch.setattr(module, name, value)
        with scores.paths() as ran:
            out = scores.attend(
                *inputs, case.visibility, scale=0.7, rows_per_token=case.P, rows_causal=case.rows_causal
            )
        assert set(ran) <= {"fused", "masked"}
        agree(case, out, inputs)


@examples(4)
@given(case=cases(), cut=st.sampled_from([1, 200, 1 << 24]))
def test_materialised_blocks(case, cut):
    inputs = inputs_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_BLOCK_ELEMENTS", cut)
        out = blocks.attend(
            *inputs, case.visibility, 0.7, case.P, case.rows_causal, kind="softmax", softcap=None, dropout=0.0
        )
        agree(case, out, inputs)


@examples(3)
@given(case=cases(), few=st.sampled_from([0, 1 << 22]))
def test_a_gpus_ways(case, few):
    """scaled_dot_product_attention and flex attention in their plain forms, which any processor has."""
    inputs = inputs_of(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gpu, "FEW", few)
        patch.setattr(gpu, "takes", lambda q: True)
        patch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
        patch.setattr(flex_attention, "_WARNINGS_SHOWN", {"flex_attention_performance"})
        with torch._dynamo.config.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
            out, _ = gpu.attend(*inputs, case.visibility, 0.7, case.P, case.rows_causal)
            agree(case, out, inputs, 1e-10)
    torch.compiler.reset()
