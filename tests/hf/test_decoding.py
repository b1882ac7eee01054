"""transformers' other ways to decode: drafts, streams, chunks of the prompt, quantized caches."""

import threading
import types

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    DynamicCache,
    PreTrainedTokenizerFast,
    QuantizedCache,
    TextIteratorStreamer,
    TextStreamer,
    cache_utils,
)

from headloom.hf import HFCache, graft

G2 = {"num_kv_heads": 2}
KINDS = {
    "iha": [("iha", {**G2, "pseudo_heads": 2})] * 2,
    "sas": [("sas", {**G2, "simulated_heads": 8, "kernel_size": 3})] * 2,
    "mla": [("mla", {})] * 2,
    "windows": [("iha", {**G2, "pseudo_heads": 2, "window": 4}), ("gqa", G2)],
}
SETTINGS = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 10}


@pytest.fixture(params=KINDS)
def model(request, mixed):
    return mixed(KINDS[request.param])


@pytest.fixture
def small(llama):
    """A plain Llama that drafts; it agrees with nobody."""
    return llama(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=9)


@pytest.mark.parametrize("how", ["assistant", "itself", "lookup"])
def test_drafts_change_nothing(model, small, ids, how):
    x = torch.cat([ids(1, 5), ids(1, 5)], 1)  # a repetition, for the lookup to find
    more = {"assistant": {"assistant_model": small}, "itself": {"assistant_model": model}}
    more["lookup"] = {"prompt_lookup_num_tokens": 3}
    assert torch.equal(model.generate(x, **SETTINGS, **more[how]), model.generate(x, **SETTINGS))


def test_a_graft_drafts_for_its_original(llama, ids):
    original, drafting = llama(), llama()
    drafting = graft(drafting, "iha", pseudo_heads=2)
    x = ids(1, 6)
    wanted = original.generate(x, **SETTINGS)
    assert torch.equal(original.generate(x, assistant_model=drafting, **SETTINGS), wanted)


@pytest.mark.parametrize("more", [{}, {"num_beams": 3}, {"prefill_chunk_size": 3}], ids=["greedy", "beams", "chunks"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_every_cache_gives_the_tokens_of_none(model, ids, more, cache):
    x, mask = ids(2, 8), torch.ones(2, 8, dtype=torch.long)
    mask[0, :3] = 0
    plain = {**SETTINGS, **{k: v for k, v in more.items() if k == "num_beams"}}
    wanted = model.generate(x, attention_mask=mask, use_cache=False, **plain)
    got = model.generate(x, attention_mask=mask, cache_implementation=cache, **{**SETTINGS, **more})
    assert torch.equal(got, wanted)


def test_prompts_stream_word_by_word(mixed, ids, capsys):
    model, x = mixed(KINDS["iha"]), ids(1, 4)
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(37)}, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw)
    wanted = tokenizer.decode(model.generate(x, **SETTINGS)[0, 4:])
    model.generate(x, streamer=TextStreamer(tokenizer, skip_prompt=True), **SETTINGS)
    assert capsys.readouterr().out.strip() == wanted
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=900)
    thread = threading.Thread(target=model.generate, args=(x,), kwargs={"streamer": streamer, **SETTINGS})
    thread.start()
    pieces = list(streamer)
    thread.join()
    assert "".join(pieces).strip() == wanted and len(pieces) > 5


@pytest.mark.parametrize("kind", ["iha", "gqa"])
def test_a_quantized_cache_errs_as_the_originals_does(llama, ids, kind):
    """fp8, the one backend of transformers that needs no package: both quantized, the graft stands where the original
    stands, because a base cache holds the same keys and values."""
    original, x = llama(), ids(2, 9)
    grafted = llama()
    grafted = graft(grafted, kind, **({"pseudo_heads": 2} if kind == "iha" else {}))
    how = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}, "output_logits": True}
    logits = [
        torch.stack(m.generate(x, return_dict_in_generate=True, **how, **SETTINGS).logits) for m in (original, grafted)
    ]
    exact = torch.stack(original.generate(x, return_dict_in_generate=True, output_logits=True, **SETTINGS).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-5)
    assert (logits[0] - exact).abs().max() > 1e-2
    cache = QuantizedCache("fp8", grafted.config)
    grafted(x, cache=cache)
    assert HFCache(cache).nbytes() == 3 * 2 * (2 * 9 * 2 * 10 + 4)  # layers, k and v: a byte each, and a scale


@pytest.fixture
def quanto(monkeypatch):
    """optimum-quanto compiles its unpacking of bits when it is first used, for a minute; here it is done in torch."""
    pytest.importorskip("optimum.quanto", reason="optimum-quanto is not installed (pip install headloom[dev])")
    from optimum.quanto.library.extensions import get_extension

    def unpack(packed, bits):
        return torch.cat([(packed >> shift) & (2**bits - 1) for shift in range(0, 8, bits)])

    monkeypatch.setattr(get_extension("quanto_cpp"), "_lib", types.SimpleNamespace(unpack=unpack))


@pytest.mark.parametrize("bits", [4, 2])
def test_a_quanto_cache_holds_what_the_originals_does(llama, ids, quanto, bits):
    """A base cache has the original's keys and values, and so its rounded ones; SAS remembers others, rounded too."""
    x, packing = ids(2, 12), {"nbits": bits, "q_group_size": 16, "residual_length": 4}
    how = {"cache_implementation": "quantized", "cache_config": {"backend": "quanto", **packing}, **SETTINGS}

    def run(kind, options):
        model = llama(head_dim=16)
        if kind is not None:
            model = graft(model, kind, **options)
        cache = QuantizedCache("quanto", model.config, **packing)
        with torch.no_grad():
            logits = torch.cat([model(part, cache=cache).logits for part in x.split([4] + [1] * 8, 1)], 1)
            exact = model(x, use_cache=False).logits
        return model.generate(x, **how), logits, (logits - exact).pow(2).mean().sqrt(), HFCache(cache).nbytes()

    tokens, logits, error, size = run(None, {})
    assert error > 0.05
    numbers = 3 * 2 * 2 * 2 * 12 * 16  # layers, k and v, batch, heads, tokens, width
    assert size == numbers * bits // 8 + numbers // 16 * 2 * 8, "bits, and a scale and a shift for each group"
    for kind, options in (("iha", {"pseudo_heads": 2}), ("gqa", {})):
        got = run(kind, options)
        assert torch.equal(got[0], tokens) and got[3] == size
        torch.testing.assert_close(got[1], logits, rtol=0, atol=1e-9)
    assert run("sas", {"simulated_heads": 8, "kernel_size": 1})[2] < 1.5 * error


def test_bytes_of_a_cache_that_is_packed_as_hqq_does():
    """A layer's keys are (packed bits, what describes them): scale and zero count, sizes and names do not."""
    packed = {"scale": torch.zeros(1, 6), "zero": torch.zeros(1, 6), "shape": torch.Size((1, 2, 3, 16)), "axis": 0}
    keys = (torch.zeros(8, 6, dtype=torch.uint8), packed)
    layer = types.SimpleNamespace(keys=torch.zeros(0), values=None, _quantized_keys=keys, _quantized_values=keys)
    assert HFCache(types.SimpleNamespace(layers=[layer])).nbytes() == 2 * (48 + 2 * 6 * 4)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_quantized_caches_without_their_package_say_so(mixed, ids, backend, monkeypatch):
    """transformers' own sentence reaches the user."""
    name = {"quanto": "is_optimum_quanto_available", "hqq": "is_hqq_available"}[backend]
    monkeypatch.setattr(cache_utils, name, lambda: False)
    model = mixed(KINDS["iha"])
    with pytest.raises(ImportError, match="You need to install"):
        model.generate(ids(1, 4), cache_implementation="quantized", cache_config={"backend": backend}, **SETTINGS)


def test_a_base_cache_is_the_originals_to_the_byte(llama, ids):
    """Same tensors, same shapes, same bytes; "expanded" holds P H heads, P times mha's, and gives the same logits."""
    x, caches, logits = ids(2, 7), {}, {}
    for name, options in {"original": None, "base": {}, "expanded": {"cache": "expanded"}}.items():
        model = llama(kv_heads=4)
        if options is not None:
            model = graft(model, "iha", pseudo_heads=3, **options)
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            logits[name] = torch.cat([model(part, cache=cache).logits for part in (x[:, :4], x[:, 4:5], x[:, 5:])], 1)
        caches[name] = [(layer.keys, layer.values) for layer in cache.layers]
        assert HFCache(cache).nbytes() == sum(t.numel() * t.element_size() for pair in caches[name] for t in pair)
    for base, original, expanded in zip(caches["base"], caches["original"], caches["expanded"], strict=True):
        for b, o, e in zip(base, original, expanded, strict=True):
            assert b.shape == o.shape == (2, 4, 7, 10) and b.dtype == o.dtype
            assert e.shape == (2, 12, 7, 10)
    torch.testing.assert_close(caches["base"][0], caches["original"][0], rtol=0, atol=1e-12)
    for name in ("base", "expanded"):
        torch.testing.assert_close(logits[name], logits["original"], rtol=0, atol=1e-9)
