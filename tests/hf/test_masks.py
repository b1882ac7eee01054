"""What a model's tokens see: every form of mask, on every backend."""

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import causal_mask_function

from headloom.core.errors import HeadloomError
from headloom.hf.model import masks
from headloom.ops.masks import Causal, Dense, Padding

BACKENDS = ["headloom", "sdpa", "eager"]


def logits(model, ids, **call):
    with torch.no_grad():
        return model(ids, use_cache=False, **call).logits


def four_d(real, dtype=torch.bool):
    """The 4-D mask of a 2-D one: causal, real keys."""
    B, T = real.shape
    visible = torch.ones(T, T, dtype=torch.bool).tril() & real[:, None, :].bool() & real[:, :, None].bool()
    visible = visible[:, None]
    if dtype == torch.bool:
        return visible
    return torch.zeros(B, 1, T, T, dtype=dtype).masked_fill(~visible, torch.finfo(dtype).min)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["none", "2d", "4d", "4d-float"])
def test_a_later_token_moves_no_earlier_logit(tiny, ids, variant, backend, form):
    model = tiny(variant)
    model.set_attn_implementation(backend)
    x = ids(2, 9)
    real = torch.ones(2, 9, dtype=torch.long)
    call = {
        "none": {},
        "2d": {"attention_mask": real},
        "4d": {"attention_mask": four_d(real)},
        "4d-float": {"attention_mask": four_d(real, torch.float64)},
    }[form]
    y = x.clone()
    y[:, -1] = (x[:, -1] + 1) % 37
    before, after = logits(model, x, **call), logits(model, y, **call)
    assert torch.equal(before[:, :-1], after[:, :-1])
    assert (before[:, -1] - after[:, -1]).abs().max() > 1e-3


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_in_every_form_gives_the_unpadded_logits(tiny, ids, variant, backend):
    """[[PAD, PAD, a, b], [a, b, c, d]]: no NaN, real rows as if alone, 2-D = 4-D boolean = 4-D float."""
    model = tiny(variant)
    model.set_attn_implementation(backend)
    x = ids(2, 4)
    real = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    alone = logits(model, x[:1, 2:])
    for mask in (real, four_d(real), four_d(real, torch.float64)):
        out = logits(model, x, attention_mask=mask)
        assert out.isfinite().all()
        torch.testing.assert_close(out[:1, 2:], alone, rtol=0, atol=1e-10)
        torch.testing.assert_close(out[1:], logits(model, x[1:]), rtol=0, atol=1e-10)


def test_a_row_that_sees_nothing_has_output_zero(tiny, ids):
    """Mask [F, T, T] with causality: the first token's attention is exactly 0."""
    model = tiny("mha")
    seen = []
    model.model.layers[0].self_attn.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    logits(model, ids(1, 3), attention_mask=torch.tensor([[0, 1, 1]]))
    assert torch.equal(seen[0][0, 0], torch.zeros(24, dtype=torch.float64))
    assert seen[0][0, 1].abs().min() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_window_counts_real_tokens(tiny, ids, variant, backend):
    """S=8, W=4: changing token j moves the attention of tokens j..j+3 of the first layer, no other."""
    model = tiny(variant, num_layers=1, options={"window": 4})
    assert model.config.sliding_window == 4
    model.set_attn_implementation(backend)
    x = ids(1, 8)
    for j in range(8):
        y = x.clone()
        y[0, j] = (x[0, j] + 1) % 37
        moved = (logits(model, x) - logits(model, y)).abs().amax(-1)[0] > 1e-9
        assert moved.tolist() == [j <= i < j + 4 for i in range(8)]


def test_restarting_positions_open_documents(tiny, ids, variant):
    """Positions 0 1 2 0 1 with an all-ones mask: token 0 is not seen by 3 and 4; token 2 sees three tokens."""
    model, x = tiny(variant), ids(1, 5)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    call = {"position_ids": positions, "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    out = logits(model, x, **call)
    torch.testing.assert_close(out[:, :3], logits(model, x[:, :3]), rtol=0, atol=1e-10)
    torch.testing.assert_close(out[:, 3:], logits(model, x[:, 3:]), rtol=0, atol=1e-10)
    torch.testing.assert_close(out, logits(model, x, position_ids=positions), rtol=0, atol=1e-10)
    given = {"documents": torch.tensor([[5, 5, 5, 2, 2]]), "position_ids": positions}
    torch.testing.assert_close(out, logits(model, x, **given), rtol=0, atol=1e-10)


def test_explicit_lengths_win_over_a_mask(tiny, ids):
    model, x = tiny("mha"), ids(1, 6)
    call = {"cu_seq_lens_q": torch.tensor([0, 3, 6]), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]])}
    out = logits(model, x, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 0]]), **call)
    torch.testing.assert_close(out[:, 3:], logits(model, x[:, 3:]), rtol=0, atol=1e-10)


def test_left_padded_positions_are_no_documents(tiny, ids):
    """transformers gives padding the position 1 (or 0): after padding is applied nothing restarts."""
    model, x = tiny("mha"), ids(1, 5)
    mask = torch.tensor([[0, 0, 1, 1, 1]])
    for pad in (0, 1):
        positions = torch.tensor([[pad, pad, 0, 1, 2]])
        out = model(x, attention_mask=mask, position_ids=positions)
        torch.testing.assert_close(out.logits[:, 2:], logits(model, x[:, 2:]), rtol=0, atol=1e-10)
        step = {
            "position_ids": torch.tensor([[3]]),
            "attention_mask": torch.ones(1, 6).index_fill(1, torch.tensor([0, 1]), 0),
        }
        model(x[:, :1], cache=out.cache, **step)  # and decoding goes on


def test_decoding_after_a_packed_prefill_is_refused(tiny, ids):
    model, x = tiny("mha"), ids(1, 5)
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    cache = model(x, position_ids=positions, use_cache=True).cache
    with pytest.raises(HeadloomError, match="no document ids"):
        model(x[:, :1], cache=cache, position_ids=torch.tensor([[2]]))
    with pytest.raises(HeadloomError, match="no document ids"):
        model.generate(x, position_ids=positions, max_new_tokens=3)
    cache.reset()
    model(x, cache=cache)
    model(x[:, :1], cache=cache)  # emptied, it serves again
    cache = model(x, use_cache=True).cache
    with pytest.raises(HeadloomError, match="no document ids"):
        model(x, cache=cache, documents=torch.zeros(1, 5, dtype=torch.long))
    inner = model.model(x, position_ids=positions, use_cache=True).cache
    with pytest.raises(HeadloomError, match="no document ids"):
        model.model(x[:, :1], cache=inner, position_ids=torch.tensor([[2]]))


def test_positions_of_one_row_serve_the_batch(tiny, ids):
    model, x = tiny("gqa"), ids(2, 5)
    out = logits(model, x, position_ids=torch.tensor([[0, 1, 2, 0, 1]]))
    torch.testing.assert_close(out[:, 3:], logits(model, x[:, 3:]), rtol=0, atol=1e-10)


def test_a_new_document_needs_a_new_cache(tiny, ids):
    model, x = tiny("gqa"), ids(2, 4)
    mask = torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])
    cache = model(x, attention_mask=mask, use_cache=True).cache
    step = {"cache": cache, "attention_mask": torch.cat([mask, mask[:, -1:]], 1)}
    with pytest.raises(HeadloomError, match="position_ids restart at 0 after 4 cached tokens"):
        model(x[:, :1], position_ids=torch.tensor([[0], [0]]), **step)
    model(x[:, :1], position_ids=torch.tensor([[3], [4]]), **step)


def plain(q, k, v, visible, scale, softcap=None):
    """softmax attention by hand, kv heads repeated."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    "case", ["causal", "past", "window", "softcap", "encoder", "encoder-argument", "made", "stated"]
)
def test_the_function_for_other_layers_is_complete(case):
    """Against softmax attention by hand: scale, grouped heads, and causality whenever nothing says otherwise."""
    S = 7
    T = 3 if case == "past" else S
    q, k, v = (torch.randn(2, heads, n, 6, dtype=torch.float64) for heads, n in ((4, T), (2, S), (2, S)))
    module = torch.nn.Module()
    if case == "encoder":
        module.is_causal = False
    row, column = torch.arange(S - T, S)[:, None], torch.arange(S)[None]
    visible, mask, more = column <= row, None, {}
    if case.startswith("encoder"):
        visible = torch.ones(S, S, dtype=torch.bool)
        more = {"is_causal": False} if case == "encoder-argument" else {}
    if case == "window":
        visible, more = visible & (column > row - 3), {"sliding_window": 3}
    if case == "softcap":
        more = {"softcap": 2.0}
    if case in ("made", "stated"):
        mask = torch.rand(2, 1, S, S) > 0.3
        mask |= torch.eye(S, dtype=torch.bool)
        visible = visible & mask if case == "made" else mask
        more = {"mask_is_all": False} if case == "made" else {"sliding_window": 2, "mask_is_all": True}
    out, weights = masks.attention_function(module, q, k, v, mask, scaling=0.7, **more)
    assert weights is None and out.is_contiguous()
    torch.testing.assert_close(out, plain(q, k, v, visible, 0.7, more.get("softcap")), rtol=0, atol=1e-12)
    dropped = masks.attention_function(module, q, k, v, mask, dropout=0.5, **more)[0]
    assert (dropped - masks.attention_function(module, q, k, v, mask, **more)[0]).abs().max() > 0.01
    with pytest.raises(HeadloomError, match="attention sinks"):
        masks.attention_function(module, q, k, v, mask, s_aux=torch.zeros(4))


def test_both_functions_are_registered():
    masks.register_masks()
    assert AttentionInterface()["headloom"] is masks.attention_function
    assert AttentionMaskInterface()["headloom"] is masks.mask_function


def test_mask_function_says_predicates():
    real = torch.tensor([[0, 1, 1]])
    assert masks.mask_function(1, 3, 3) is None
    assert masks.mask_function(1, 3, 3, attention_mask=torch.ones(1, 3)) is None
    out = masks.mask_function(1, 1, 3, q_offset=2, attention_mask=real)
    assert isinstance(out, Padding) and out.values.tolist() == [[False, True, True]]
    assert isinstance(out.to("cpu"), Padding)
    with pytest.raises(HeadloomError, match="covers 3 tokens, the cache and this call have 4"):
        masks.mask_function(1, 1, 4, q_offset=3, attention_mask=real)


def test_mask_function_hides_the_unwritten_room_of_a_static_cache():
    """Two tokens after one, room for five; the first one is padding."""
    rule = {"mask_function": causal_mask_function}
    out = masks.mask_function(1, 2, 5, q_offset=1, attention_mask=torch.tensor([[False, True, True]]), **rule)
    assert isinstance(out, Dense) and out.values.int().tolist() == [[[0, 1, 0, 0, 0], [0, 1, 1, 0, 0]]]
    out = masks.mask_function(1, 2, 5, q_offset=torch.tensor(1), **rule)
    assert isinstance(out, Dense) and out.values.int().tolist() == [[[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask", [torch.ones(1, 5), torch.ones(1, 1, 3, 5, dtype=torch.bool)], ids=["2d", "4d"])
def test_a_mask_over_more_tokens_than_there_are_is_refused(tiny, ids, backend, mask):
    model = tiny("mha")
    model.set_attn_implementation(backend)
    with pytest.raises(HeadloomError, match="covers 5 tokens, this call has 3 and no cache"):
        logits(model, ids(1, 3), attention_mask=mask)


def test_mask_function_writes_out_what_it_does_not_know():
    from transformers.masking_utils import and_masks, causal_mask_function, sliding_window_overlay

    def even(batch, head, query, key):
        return key % 2 == 0

    known = and_masks(sliding_window_overlay(2), causal_mask_function)
    assert masks.mask_function(1, 3, 3, mask_function=known) is None
    out = masks.mask_function(1, 3, 3, mask_function=and_masks(even, causal_mask_function))
    assert isinstance(out, Dense)
    assert out.values[0].tolist() == [[True, False, False], [True, False, False], [True, False, True]]


def test_other_masks_are_refused_by_name(tiny, ids):
    model, x = tiny("mha"), ids(1, 3)
    for shape in ((1, 4, 3, 3), (2, 1, 3, 3), (1, 1, 2, 3)):
        with pytest.raises(HeadloomError, match=rf"a mask of shape \({shape[0]}, {shape[1]}, .* cannot be read here"):
            logits(model, x, attention_mask=torch.ones(shape, dtype=torch.bool))
        with pytest.raises(HeadloomError, match="cannot be read here"):
            model.model(x, attention_mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(HeadloomError, match=r"Tensor of shape \(1, 4, 3, 3\)"):
        masks.arriving(torch.ones(1, 4, 3, 3, dtype=torch.bool), 0, 3)
    with pytest.raises(HeadloomError, match="other biases are not supported"):
        logits(model, x, attention_mask=torch.full((1, 1, 3, 3), -0.5))
    with pytest.raises(HeadloomError, match="must be boolean"):
        logits(model, x, attention_mask=torch.ones(1, 1, 3, 3, dtype=torch.long))
    assert masks.arriving(Causal(), 0, 3) == Causal()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_window_of_ours_is_off_under_a_4d_mask_and_on_under_masks_made_here(tiny, ids, backend):
    """Of a Llama, whose config knows no window: 2-D padding, and `generate` with a static cache, keep it."""
    model, x = tiny("iha", options={"window": 4}), ids(2, 9)
    model.set_attn_implementation(backend)
    real = torch.ones(2, 9, dtype=torch.long)
    real[0, :2] = 0
    out = logits(model, x, attention_mask=real)
    torch.testing.assert_close(out[1:], logits(model, x[1:]), rtol=0, atol=1e-10)
    torch.testing.assert_close(out[:1, 2:], logits(model, x[:1, 2:]), rtol=0, atol=1e-10)
    wide = tiny("iha")
    assert (logits(wide, x) - logits(model, x)).abs().max() > 1e-3
    call = {"attention_mask": four_d(torch.ones(2, 9))}
    torch.testing.assert_close(logits(model, x, **call), logits(wide, x, **call), rtol=0, atol=1e-10)
    settings = {"attention_mask": real, "max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    want = model.generate(x, use_cache=False, **settings)
    assert torch.equal(model.generate(x, cache_implementation="static", **settings), want)


def test_a_4d_mask_goes_on_after_packed_documents(tiny, ids):
    """The mask says which cached tokens are seen: two documents of three tokens, one more token for the second."""
    model, x = tiny("gqa"), ids(1, 7)
    whole = logits(model, x, documents=torch.tensor([[0, 0, 0, 1, 1, 1, 1]]), position_ids=torch.arange(7)[None])
    cache = model(x[:, :6], documents=torch.tensor([[0, 0, 0, 1, 1, 1]]), use_cache=True).cache
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 1]).bool().view(1, 1, 1, 7)
    found = model(x[:, 6:], attention_mask=mask, cache=cache, position_ids=torch.tensor([[6]])).logits
    torch.testing.assert_close(found, whole[:, 6:], rtol=0, atol=1e-10)
    with pytest.raises(HeadloomError, match="no document ids"):
        model(x[:, 6:], cache=cache)
