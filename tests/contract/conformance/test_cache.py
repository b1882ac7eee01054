"""Cached equals uncached, for every mechanism (case 16): token by token, in chunks, padded, shifted, windowed."""

import pytest
import torch
from oracles.compare import assert_close, draw
from oracles.modules import module_of
from oracles.variations import accepts, only

import headloom as hl

CHUNKS = {"ones": [1] * 7, "chunks": [3, 1, 2, 1], "prefill": [5, 1, 1], "at once": [7], "two": [5, 2]}


def run(module, x, chunks, *, positions=None, padding=None, whole_padding=False):
    cache, out, start = hl.Cache(), [], 0
    for size in chunks:
        part = slice(start, start + size)
        call = {}
        if positions is not None:
            call["positions"] = positions[..., part]
        if padding is not None:
            call["padding"] = padding[:, : start + size] if whole_padding else padding[:, part]
        out.append(module(x[:, part], cache=cache, **call).detach())
        start += size
    return torch.cat(out, dim=1), cache


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
def test_cached_equals_uncached(causal, chunks):
    module = module_of(causal)
    x = draw(2, 7, causal[1].hidden_size)
    found, cache = run(module, x, chunks)
    assert_close(found, module(x).detach(), "cached", 1e-10)
    assert cache.length(0) == 7


@pytest.mark.parametrize("chunks", [CHUNKS["ones"], CHUNKS["chunks"]], ids=["ones", "chunks"])
def test_cached_with_a_position_offset(causal, chunks):
    module = module_of(causal)
    x = draw(2, 7, causal[1].hidden_size)
    for positions in (torch.arange(7) + 5, torch.stack([torch.arange(7) + 5, torch.arange(7)])):
        want = module(x, positions=positions).detach()
        assert_close(run(module, x, chunks, positions=positions)[0], want, "offset", 1e-10)


@pytest.mark.parametrize("whole", [False, True], ids=["call", "whole"])
@pytest.mark.parametrize(
    "chunks", [CHUNKS["ones"], CHUNKS["chunks"], CHUNKS["prefill"]], ids=["ones", "chunks", "prefill"]
)
def test_cached_with_left_padding(causal, chunks, whole):
    """Case 17: prompts of 4 and 7 tokens left-padded to 7; padding given for the call or for cache and call."""
    module = module_of(causal)
    x = draw(2, 7, causal[1].hidden_size)
    real = torch.ones(2, 7, dtype=torch.bool)
    real[0, :3] = False
    places = (real.long().cumsum(1) - 1).clamp(min=0)
    for positions in (None, places):
        want = module(x, padding=real, positions=positions).detach()
        found, _ = run(module, x, chunks, positions=positions, padding=real, whole_padding=whole)
        assert_close(found, want, "padded and cached", 1e-10)
        assert_close(found[0, 3:], module(x[:1, 3:]).detach()[0], "padded and cached, alone", 1e-10)


@only(lambda name, config: config.window is None and accepts(config, window=4))
@pytest.mark.parametrize("chunks", [[1] * 12, [2] * 6, [5, 1, 1, 5]], ids=["ones", "twos", "mixed"])
@pytest.mark.parametrize("padded", [False, True])
def test_case_6_window_four_with_a_cache(causal, chunks, padded):
    """Ten and more decoded tokens at W=4 equal the uncached run at every step, left-padded too."""
    name, config = causal
    config = config.replace(window=4)
    module = module_of((name, config))
    x = draw(2, 12, config.hidden_size)
    real = torch.ones(2, 12, dtype=torch.bool)
    if padded:
        real[1, :2] = False
    want = module(x, padding=real if padded else None).detach()
    found, _ = run(module, x, chunks, padding=real if padded else None)
    assert_close(found, want, "window and cache", 1e-10)


def test_case_18_reading_without_writing(causal):
    """update_cache=False: same output as with writing, nothing written, and the next call is as if it never was."""
    module = module_of(causal)
    x, other = draw(2, 7, causal[1].hidden_size), draw(2, 2, causal[1].hidden_size, seed=8)
    want = module(x).detach()
    cache = hl.Cache()
    module(x[:, :4], cache=cache)
    nbytes = cache.nbytes()
    first = module(x[:, 4:], cache=cache, update_cache=False).detach()
    assert cache.length(0) == 4 and cache.nbytes() == nbytes
    module(other, cache=cache, update_cache=False)
    assert_close(first, want[:, 4:], "read only", 1e-10)
    assert_close(module(x[:, 4:], cache=cache).detach(), want[:, 4:], "after reading", 1e-10)
    assert cache.length(0) == 7


def test_reading_an_empty_cache_writes_nothing(causal):
    module = module_of(causal)
    x = draw(2, 5, causal[1].hidden_size)
    cache = hl.Cache()
    assert_close(module(x, cache=cache, update_cache=False).detach(), module(x).detach(), "empty cache", 1e-12)
    assert cache.length(0) == 0 and cache.nbytes() == 0


def test_packed_prefill_then_more_of_the_last_document(causal):
    """Documents are remembered: tokens that follow in document 1 see document 1 only."""
    module = module_of(causal)
    x = draw(1, 7, causal[1].hidden_size)
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1]])
    want = module(x, documents=documents).detach()
    cache = hl.Cache()
    parts = [module(x[:, a:b], documents=documents[:, a:b], cache=cache) for a, b in ((0, 5), (5, 6), (6, 7))]
    assert_close(torch.cat(parts, 1).detach(), want, "packed and cached", 1e-10)


def test_the_cache_holds_what_the_slots_say(causal):
    """Elements per token are cache_slots()'s heads times width, and constant_slots() whatever the number of tokens;
    the cache's type is the model's."""
    module = module_of(causal, torch.float32)
    x = draw(2, 5, causal[1].hidden_size).float()
    sizes = []
    for tokens in (2, 5):
        cache = hl.Cache()
        module(x[:, :tokens], cache=cache)
        sizes.append(cache.nbytes())
    per_token = sum(heads * width for heads, width in module.cache_slots().values())
    constant = sum(heads * rows * width for heads, rows, width in module.constant_slots().values())
    assert sizes == [4 * 2 * (tokens * per_token + constant) for tokens in (2, 5)] and sizes[1] > 0
    held = cache.held(0)
    assert set(held.slots) == {*module.cache_slots(), *module.constant_slots()} and cache.length(0) == 5
    for name, shape in module.constant_slots().items():
        assert held.slots[name].shape == (2, *shape) and held.slots[name].dtype == torch.float32
    for name, (heads, width) in module.cache_slots().items():
        assert held.slots[name].shape == (2, heads, 5, width) and held.slots[name].dtype == torch.float32
