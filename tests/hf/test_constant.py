"""A state of constant size in a transformers cache: generation, padding, beams; crop and static caches refused."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from headloom.core.errors import HeadloomError
from headloom.hf import HFCache

SPEC = ("linear", {"num_kv_heads": 2, "chunk_size": 2})
MODELS = {"all": [SPEC, SPEC], "first": [SPEC, ("gqa", {"num_kv_heads": 2})], "last": [("mha", {}), SPEC]}
CLOSE = {"rtol": 0, "atol": 1e-10}
SETTINGS = {"do_sample": False, "eos_token_id": None}


@pytest.fixture(params=MODELS)
def model(request, mixed):
    return mixed(MODELS[request.param])


def run(model, x, chunks, mask=None, cache=None):
    cache, outs, first = DynamicCache(config=model.config) if cache is None else cache, [], 0
    with torch.no_grad():
        for size in chunks:
            last = first + size
            given = None if mask is None else mask[:, :last]
            outs.append(model(x[:, first:last], cache=cache, use_cache=True, attention_mask=given).logits)
            first = last
    assert cache.get_seq_length() == x.shape[1]
    return torch.cat(outs, 1), cache


@pytest.mark.parametrize("chunks", [[1] * 9, [9], [4, 5], [3, 1, 1, 4]])
@pytest.mark.parametrize("padded", [False, True])
def test_teacher_forcing_equals_the_full_pass(model, ids, chunks, padded):
    x, mask = ids(2, 9), torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    with torch.no_grad():
        want = model(x, attention_mask=mask if padded else None, use_cache=False).logits
    real = mask.bool() if padded else torch.ones_like(mask, dtype=torch.bool)
    for cache in (None, DynamicCache()):
        found, _ = run(model, x, chunks, mask if padded else None, cache)
        torch.testing.assert_close(found[real], want[real], **CLOSE)


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"do_sample": True, "num_return_sequences": 2}],
    ids=["greedy", "beams", "sampled beams", "sampled"],
)
def test_generation_does_not_depend_on_the_cache(model, ids, how):
    x, mask = ids(2, 5), torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    outs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        outs.append(
            model.generate(x, attention_mask=mask, max_new_tokens=6, use_cache=use_cache, **{**SETTINGS, **how})
        )
    assert torch.equal(*outs)


def test_its_size_is_that_of_the_state(mixed, ids):
    model = mixed([SPEC, SPEC])
    for tokens in (3, 9):
        _, cache = run(model, ids(2, tokens), [tokens])
        assert HFCache(cache).nbytes() == 2 * 2 * 2 * 10 * 11 * 8  # layers, batch, G K (V + 1), float64


def test_rows_are_reordered_repeated_and_picked(mixed, ids):
    """Continuing after a change of rows is continuing those rows."""
    model, x = mixed([SPEC, SPEC]), ids(3, 6)
    mask = torch.ones(3, 6, dtype=torch.long)
    mask[1, :2] = 0
    with torch.no_grad():
        want = model(x, attention_mask=mask).logits[:, 5]
        for name, given, rows in (
            ("reorder_cache", torch.tensor([2, 0, 0]), [2, 0, 0]),
            ("batch_select_indices", torch.tensor([1, 2]), [1, 2]),
            ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ):
            _, cache = run(model, x[:, :5], [5], mask[:, :5])
            getattr(cache, name)(given)
            out = model(x[rows, 5:], attention_mask=mask[rows], cache=cache).logits[:, 0]
            torch.testing.assert_close(out, want[rows], **CLOSE)
        cache.reset()
        assert cache.get_seq_length() == 0
        torch.testing.assert_close(model(x, attention_mask=mask, cache=cache).logits[:, 5], want, **CLOSE)


def test_crop_and_static_caches_are_refused_by_name(model, ids):
    x = ids(1, 5)
    _, cache = run(model, x, [5])
    with pytest.raises(HeadloomError, match=r"constant size cannot be cropped.*assisted"):
        cache.crop(-2)
    with pytest.raises(HeadloomError, match=r"constant size cannot be kept in a StaticLayer.*default"):
        model.generate(x, max_new_tokens=2, cache_implementation="static", **SETTINGS)
    with pytest.raises(HeadloomError, match="StaticLayer of a StaticCache"):
        model(x, cache=StaticCache(config=model.config, max_cache_len=9))
    state = next(layer for layer in cache.layers if not hasattr(layer, "is_compileable") or not layer.is_croppable)
    with pytest.raises(HeadloomError, match="takes no keys and values"):
        state.update(torch.zeros(1), torch.zeros(1))


def test_a_window_from_transformers_is_refused_after_a_state(mixed, ids):
    """A dense mask (the backend sdpa makes one for padding) cannot reach tokens that are summed up."""
    model, x = mixed([SPEC, SPEC]), ids(2, 5)
    model.set_attn_implementation("sdpa")
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    _, cache = run(model, x, [5], mask)
    with pytest.raises(HeadloomError, match="state of constant size"):
        model(x[:, :1], attention_mask=torch.cat([mask, mask[:, -1:]], 1), cache=cache)
