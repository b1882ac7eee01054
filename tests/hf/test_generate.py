"""Generation through transformers' caches: cached = uncached in every form."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from headloom.hf import HFCache, graft
from headloom.hf.model.cache import as_pair, from_pair
from headloom.ops.cache import Seen

CLOSE = {"rtol": 0, "atol": 1e-10}


def run(model, x, chunks, **call):
    """Logits of x fed in chunks of these sizes, one cache; and the cache."""
    cache, outs, first = DynamicCache(config=model.config), [], 0
    mask, positions = call.get("attention_mask"), call.get("position_ids")
    with torch.no_grad():
        for size in chunks:
            last = first + size
            step = {"attention_mask": None if mask is None else mask[:, :last]}
            if positions is not None:
                step["position_ids"] = positions[:, first:last]
            out = model(x[:, first:last], cache=cache, use_cache=True, **step)
            assert out.cache is cache
            outs.append(out.logits)
            first = last
    assert cache.get_seq_length() == x.shape[1]
    return torch.cat(outs, 1), cache


def full(model, x, **call):
    with torch.no_grad():
        return model(x, use_cache=False, **call).logits


@pytest.mark.parametrize("chunks", [[1] * 9, [9], [4, 5], [3, 1, 1, 4]])
@pytest.mark.parametrize("backend", ["headloom", "sdpa"])
def test_teacher_forcing_in_chunks_equals_the_full_pass(tiny, ids, variant, chunks, backend):
    model, x = tiny(variant), ids(2, 9)
    model.set_attn_implementation(backend)
    out, cache = run(model, x, chunks)
    torch.testing.assert_close(out, full(model, x), **CLOSE)
    assert cache.layers[0].keys.dtype == model.dtype


def test_a_position_offset_is_kept(tiny, ids, variant):
    model, x = tiny(variant), ids(2, 7)
    positions = torch.arange(5, 12).expand(2, -1)
    out, _ = run(model, x, [3, 4], position_ids=positions)
    torch.testing.assert_close(out, full(model, x, position_ids=positions), **CLOSE)


def test_left_padding_decodes_as_alone(tiny, ids, variant):
    """Prompts of 3 and 5 tokens left-padded to 5: logits as alone, also four steps later, positions given or not."""
    model, x = tiny(variant), ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    alone = full(model, x[:1, 2:])
    for positions in (None, (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)):
        call = {"attention_mask": mask} if positions is None else {"attention_mask": mask, "position_ids": positions}
        out, _ = run(model, x, [5, 1, 1, 1, 1], **call)
        torch.testing.assert_close(out[:1, 2:], alone, **CLOSE)
        torch.testing.assert_close(out[1:], full(model, x[1:]), **CLOSE)


def test_windows_drop_what_nobody_sees(tiny, ids, variant):
    """W = 4: every step equals the uncached run, left padding included, while the cache holds three tokens."""
    model, x = tiny(variant, options={"window": 4}), ids(2, 15)
    mask = torch.ones(2, 15, dtype=torch.long)
    mask[0, :3] = 0
    wanted = full(model, x, attention_mask=mask)
    for chunks in ([5] + [1] * 10, [1] * 15, [6, 5, 4]):
        out, cache = run(model, x, chunks, attention_mask=mask)
        torch.testing.assert_close(out[mask.bool()], wanted[mask.bool()], **CLOSE)
        assert cache.layers[1].keys.shape[2] == 3


@pytest.mark.parametrize("window", [1, 2, 50])
def test_extreme_windows(tiny, ids, window):
    model, x = tiny("gqa", options={"window": window}), ids(1, 8)
    torch.testing.assert_close(run(model, x, [3] + [1] * 5)[0], full(model, x), **CLOSE)


def test_windows_in_some_layers(mixed, ids):
    model = mixed([("gqa", {"num_kv_heads": 2, "window": 3}), ("gqa", {"num_kv_heads": 2})])
    assert model.config.layer_types == ["sliding_attention", "full_attention"]
    x = ids(2, 9)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    for given in (None, mask):
        out, cache = run(model, x, [4, 1, 1, 3], attention_mask=given)
        wanted = full(model, x, attention_mask=given)
        real = mask.bool() if given is not None else torch.ones_like(mask, dtype=torch.bool)
        torch.testing.assert_close(out[real], wanted[real], **CLOSE)
        assert [layer.keys.shape[2] for layer in cache.layers] == [2, 9]
    for T in (2, 5):  # the window is filled while decoding, and by the prompt
        got = model.generate(x[:, -T:], attention_mask=torch.ones(2, T, dtype=torch.long), max_new_tokens=7,
                             cache_implementation="static", **SETTINGS)  # fmt: skip
        assert torch.equal(got, greedy(model, x[:, -T:], 7))
    got = model.generate(
        x[:, :5], attention_mask=mask[:, :5], max_new_tokens=7, cache_implementation="static", **SETTINGS
    )
    assert torch.equal(got, greedy(model, x[:, :5], 7, mask[:, :5]))


def greedy(model, x, steps, mask=None):
    """By hand and without a cache."""
    for _ in range(steps):
        call = {}
        if mask is not None:
            positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)
            call = {"attention_mask": mask, "position_ids": positions}
        x = torch.cat([x, full(model, x, **call)[:, -1].argmax(-1, keepdim=True)], 1)
        mask = None if mask is None else torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return x


SETTINGS = {"do_sample": False, "eos_token_id": None}


@pytest.mark.parametrize("cache", [None, "static"])
def test_generate_is_greedy_decoding(tiny, ids, variant, cache):
    model, x = tiny(variant), ids(2, 5)
    mask = torch.ones(2, 5, dtype=torch.long)
    mask[0, :2] = 0
    for given in (None, mask):
        wanted = greedy(model, x, 6, given)
        given = torch.ones_like(mask) if given is None else given
        got = model.generate(x, attention_mask=given, max_new_tokens=6, cache_implementation=cache, **SETTINGS)
        assert torch.equal(got, wanted)


def test_static_windows(tiny, ids):
    model, x = tiny("gqa", options={"window": 4}), ids(2, 6)
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :3] = 0
    got = model.generate(x, attention_mask=mask, max_new_tokens=7, cache_implementation="static", **SETTINGS)
    assert torch.equal(got, greedy(model, x, 7, mask))


@pytest.mark.parametrize("layers", ["1", "0,2"])
def test_a_static_cache_of_a_partial_graft_by_hand(llama, ids, layers):
    """No mask is given: layers that were not grafted do not see the places that nothing stands at yet either."""
    model, x = llama(), ids(2, 6)
    model = graft(model, "iha", layers=layers, pseudo_heads=2)
    cache = StaticCache(config=model.config, max_cache_len=11)
    with torch.no_grad():
        outs = [model(x[:, a:b], cache=cache).logits for a, b in ((0, 3), (3, 4), (4, 6))]
    torch.testing.assert_close(torch.cat(outs, 1), full(model, x), **CLOSE)


def test_a_static_cache_by_hand(tiny, ids, variant):
    model, x = tiny(variant), ids(2, 6)
    cache = StaticCache(config=model.config, max_cache_len=11)
    with torch.no_grad():
        outs = [model(x[:, a:b], cache=cache).logits for a, b in ((0, 3), (3, 4), (4, 6))]
    torch.testing.assert_close(torch.cat(outs, 1), full(model, x), **CLOSE)


@pytest.mark.parametrize(
    "how", [{"num_beams": 3}, {"num_beams": 2, "do_sample": True}, {"do_sample": True, "top_k": 5}]
)
def test_beams_and_sampling_do_not_depend_on_the_cache(tiny, ids, variant, how):
    model, x = tiny(variant), ids(2, 4)
    outs = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        outs.append(model.generate(x, max_new_tokens=5, use_cache=use_cache, **{**SETTINGS, **how}))
    assert torch.equal(*outs)


def test_cache_elements(tiny, ids):
    """H = G = 16, K = 64: the base cache of iha is mha's, 2048 elements a token; expanded it is P times that."""
    sizes = {"hidden_size": 16, "num_heads": 16, "head_dim": 64, "num_layers": 1}
    wanted = {"base": 2048, "expanded": 4096}
    x = ids(1, 3)
    for cache, elements in wanted.items():
        options = {"pseudo_heads": 2, "num_kv_heads": 16, "cache": cache}
        model = tiny("iha", dtype=torch.float32, options=options, **sizes)
        out = model(x, use_cache=True).cache
        assert HFCache(out).nbytes() == 3 * elements * 4
        torch.testing.assert_close(run(model, x, [1, 2])[0], full(model, x), rtol=1e-4, atol=1e-4)
    base = tiny("mha", dtype=torch.float32, **sizes)
    assert HFCache(base(x, use_cache=True).cache).nbytes() == 3 * 2048 * 4


@pytest.mark.parametrize("options", [{"cache": "expanded"}, {"phase": "token"}, {"interaction": "paired"}])
@pytest.mark.parametrize("rope", [None, {"rope_type": "dynamic", "factor": 2.0}])
def test_other_caches_of_iha(tiny, ids, options, rope):
    layers = 2 if rope is None else 1  # frequencies of a step follow the length so far, so deeper keys differ rightly
    model, x = tiny("iha", options=options, max_positions=4, rope_scaling=rope, num_layers=layers), ids(2, 7)
    out, _ = run(model, x, [7])
    torch.testing.assert_close(out, full(model, x), **CLOSE)
    if rope is None:
        torch.testing.assert_close(run(model, x, [3, 1, 3])[0], full(model, x), **CLOSE)
    else:
        last = run(model, x, [3, 1, 3])[0][:, -1]
        torch.testing.assert_close(last, full(model, x)[:, -1], **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_changes_nothing(tiny, ids, variant, reentrant):
    model, x = tiny(variant).train(), ids(2, 7)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]]).expand(2, -1)

    def step():
        model.zero_grad()
        out = model(x, labels=x, position_ids=positions, use_cache=True)
        out.loss.backward()
        return out, {n: p.grad.clone() for n, p in model.named_parameters()}

    plain, wanted = step()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    checkpointed, got = step()
    torch.testing.assert_close(checkpointed.loss, plain.loss, rtol=0, atol=1e-12)
    for n in wanted:  # what is computed again may lie in memory otherwise, and is then added up in another order
        torch.testing.assert_close(got[n], wanted[n], rtol=0, atol=1e-12)
    assert not checkpointed.cache or checkpointed.cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "shapes",
    [{"k": (2, 3), "v": (2, 5)}, {"c": (1, 6), "r": (1, 2)}, {"a": (2, 3), "b": (4, 5), "c": (1, 7)}, {"x": (1, 7)}],
)
def test_slots_become_two_tensors_and_back(shapes):
    slots = {name: torch.randn(2, heads, 4, width) for name, (heads, width) in shapes.items()}
    first, second = as_pair(slots)
    assert first.shape[:3] == second.shape[:3] and first.shape[2] == 4
    assert min(first.shape[3], second.shape[3]) > 0
    assert first[0].numel() + second[0].numel() == sum(s[0].numel() for s in slots.values())
    back = from_pair(first, second, shapes)
    assert list(back) == list(slots) and all(torch.equal(back[n], slots[n]) for n in slots)


def test_peek_reads_without_writing():
    cache = DynamicCache()
    view = HFCache(cache)

    def new(T, value):
        slots = {"k": torch.full((1, 2, T, 3), value), "v": torch.full((1, 2, T, 3), value)}
        return Seen(slots, torch.arange(10, 10 + T)[None])

    view.append(0, new(2, 1.0))
    seen = view.peek(0, new(1, 2.0))
    assert seen.slots["k"][0, 0, :, 0].tolist() == [1.0, 1.0, 2.0] and view.length(0) == 2
    assert seen.positions_BS.tolist() == [[8, 9, 10]], "cached positions count back from this call's first"
    assert view.append(0, new(1, 2.0)).slots["k"].shape[2] == 3 == view.length(0)
