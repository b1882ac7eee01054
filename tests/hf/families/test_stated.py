"""What a caller states is the last word, in every family: 4-D masks, and padding whose positions mean nothing."""

import copy

import pytest
import torch
from transformers import StaticCache

from headloom.core.errors import HeadloomError
from headloom.hf import graft

# two continuations (3, 4) and (5, 6) of a prefix: tokens 3 and 4 of the second do not see 1 and 2
TREE = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 1]]).bool()
TREE_PLACES = torch.tensor([[0, 1, 2, 1, 2]])
DRAFTS = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]).bool()  # positions 5 6 5 6
SPECS = {
    "iha": ("iha", {"pseudo_heads": 2, "order": "virtual"}),
    "sas": ("sas", {"simulated_heads": 8, "cache": "base"}),
    "plain": ("talking_heads", {}),
}
CASES = [("iha", None), ("sas", None), ("plain", 1)]


def logits(model, x, **call):
    with torch.no_grad():
        return model(x, **call).logits


def ids(*shape, seed=3):
    return torch.randint(3, 37, shape, generator=torch.Generator().manual_seed(seed))


def floats(visible, lowest=-torch.inf, dtype=torch.float64):
    return torch.zeros(visible.shape, dtype=dtype).masked_fill(~visible, lowest)


def forms(visible):
    yield from (visible, floats(visible), floats(visible, torch.finfo(torch.float64).min))


def grafted(model, spec, layers):
    model = copy.deepcopy(model)
    model = graft(model, SPECS[spec][0], layers=layers, **SPECS[spec][1])
    return model


def implementations(model):
    """The names that the family serves, and how exactly: written out, its softmax is in float32."""
    yield from (("headloom", 1e-6), ("eager", 1e-6), *([("sdpa", 1e-6)] if model._supports_sdpa else []))


@pytest.fixture
def places(name):
    """places(positions): as the family takes them; ModernBERT takes none."""
    return lambda p: {} if name == "modernbert" else {"position_ids": p + 2 * (name == "roberta")}


@pytest.mark.parametrize(("spec", "layers"), CASES)
def test_a_4d_mask_is_all_there_is(base, near, places, spec, layers):
    """Positions that start again, and a mask that shows everything (the window is 5, or 4 to each side)."""
    original, x = base(), ids(1, 11)
    everything = torch.ones(1, 1, 11, 11, dtype=torch.bool)
    calls = [(x[:, :5], TREE[None, None], places(TREE_PLACES)), (x, everything, {})]
    wanted = [logits(original, x, attention_mask=floats(mask), **more) for x, mask, more in calls]
    model = grafted(original, spec, layers)
    for implementation, allowed in implementations(original):
        model.set_attn_implementation(implementation)
        for (x, mask, more), want in zip(calls, wanted, strict=True):
            for form in forms(mask):
                near(logits(model, x, attention_mask=form, use_cache=False, **more), want, allowed)
    model.set_attn_implementation("headloom")
    x, mask, more = calls[0]
    near(
        logits(model, x, attention_mask=mask[:, :, -1:], **more),
        logits(original, x, attention_mask=floats(mask[:, :, -1:]), **more),
        1e-6,
    )
    with torch.no_grad():  # the bare model inside, which is not a graft's class
        found = model.base_model(x, attention_mask=mask, **more)[0]
        near(found, original.base_model(x, attention_mask=floats(mask), **more)[0], 1e-6)
    with pytest.raises(HeadloomError, match="documents came beside a 4-D attention mask"):
        model(x, attention_mask=mask, documents=torch.zeros(1, 5, dtype=torch.long))


@pytest.mark.parametrize(
    ("name", "changes", "mask", "positions"),
    [
        ("llama", {}, TREE, TREE_PLACES),
        ("gpt2", {}, TREE, TREE_PLACES),
        ("llama", {}, torch.ones(2, 2).bool(), None),
        ("gpt2", {}, torch.ones(2, 2).bool(), None),
        ("mistral", {"sliding_window": 6}, torch.ones(7, 7).bool().tril(), None),
        ("bert", {}, torch.ones(5, 5).bool(), TREE_PLACES),
    ],
    indirect=["name"],
)
def test_inputs_that_were_off(base, near, mask, positions, changes):
    """By 0.29, 0.22, 0.09 and 0.004 of logits of about 1."""
    original, x = base(**changes), ids(1, len(mask), seed=4)
    assert len(x.unique()) > 1, "a token that sees its equal says the same"
    call = {"attention_mask": mask[None, None], **({} if positions is None else {"position_ids": positions})}
    near(logits(grafted(original, "iha", None), x, **call), logits(original, x, **call))


def over_cache(config, visible, room=None):
    """A mask (T, 5 + T) after five cached tokens as the family's layers look at it: the window of 5 keeps four."""
    whole = visible if room is None else torch.nn.functional.pad(visible, (0, room - visible.shape[1]))
    whole, window = whole[None, None], visible[None, None, :, 1:]
    if getattr(config, "layer_types", None):
        return {"full_attention": whole, "sliding_attention": window}
    return window if getattr(config, "sliding_window", None) else whole


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize(("spec", "layers"), CASES)
def test_a_tree_of_drafts_after_a_cache(base, encoder, near, spec, layers, static):
    if encoder:
        return  # it has no cache
    original, x = base(), ids(1, 9)
    mask = over_cache(original.config, torch.cat((torch.ones(4, 5).bool(), DRAFTS), 1), 12 if static else None)

    def run(model, mask):
        cache = StaticCache(config=model.config, max_cache_len=12) if static else None
        with torch.no_grad():
            cache = model(x[:, :5], cache=cache, use_cache=True).cache
        return logits(model, x[:, 5:], attention_mask=mask, position_ids=torch.tensor([[5, 6, 5, 6]]), cache=cache)

    bare = {k: floats(v) for k, v in mask.items()} if isinstance(mask, dict) else floats(mask)
    want, model = run(original, bare), grafted(original, spec, layers)
    near(run(model, mask), want, 1e-6)
    if not original._supports_sdpa:
        return
    model.set_attn_implementation("sdpa")
    near(run(model, mask), want, 1e-6)


@pytest.mark.parametrize("name", ["llama", "gpt2"], indirect=True)
def test_branches_in_a_cache(base, name, near):
    """Level by level: two children of a prefix of five, then a child of each, which see different cached tokens. Keys
    remembered rotated serve them; those that are rotated on reading cannot."""
    original, x = base(), ids(1, 9)
    family_tree = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
    levels = torch.cat((torch.ones(4, 5), family_tree), 1).bool()[None, None]

    def run(model):
        with torch.no_grad():
            cache, outs = model(x[:, :5], use_cache=True).cache, []
            for start in (5, 7):
                call = {"attention_mask": floats(levels[:, :, start - 5 : start - 3, : start + 2]), "cache": cache}
                call["position_ids"] = torch.full((1, 2), 5 if start == 5 else 6)
                outs.append(model(x[:, start : start + 2], **call).logits)
        return torch.cat(outs, 1)

    near(run(grafted(original, "iha", None)), run(original))
    if name == "gpt2":  # no rotary
        near(run(grafted(original, "sas", None)), run(original))
        return
    with pytest.raises(HeadloomError, match="rotates cached keys when it reads them"):
        run(grafted(original, "sas", None))


def test_masks_over_other_keys_are_refused(base, encoder):
    if encoder:
        return
    model, x = grafted(base(), "iha", None), ids(1, 9)
    drafts = torch.cat((torch.ones(4, 5).bool(), DRAFTS), 1)

    def run(mask, **cache):
        with torch.no_grad():
            cache = model(x[:, :5], use_cache=True, **cache).cache
            model(x[:, 5:], attention_mask=mask, position_ids=torch.tensor([[5, 6, 5, 6]]), cache=cache)

    with pytest.raises(HeadloomError, match=r"the 4-D mask covers 10 keys, layer 0 looks at [89]"):
        run(torch.ones(1, 1, 4, 10).bool())
    if getattr(model.config, "sliding_window", None):
        return
    shown = torch.nn.functional.pad(drafts, (0, 3), value=True)[None, None]
    with pytest.raises(HeadloomError, match="places of the cache that no token stands at"):
        run(shown, cache=StaticCache(config=model.config, max_cache_len=12))


@pytest.mark.parametrize(("spec", "layers"), CASES)
def test_padding_after_a_cache_is_no_restart(base, encoder, near, spec, layers):
    """Four cached tokens, the row [padding, x] with positions [0, 4], then another token; static and dynamic."""
    if encoder:
        return
    original, x = base(), ids(1, 7)
    model = grafted(original, spec, layers)

    def run(model, static=False):
        cache = StaticCache(config=model.config, max_cache_len=12) if static else None
        real, outs = torch.tensor([[1, 1, 1, 1, 0, 1, 1]]), []
        with torch.no_grad():
            cache = model(x[:, :4], cache=cache, use_cache=True).cache
            for start, end, positions in ((4, 6, [0, 4]), (6, 7, [5])):
                call = {"attention_mask": real[:, :end], "position_ids": torch.tensor([positions]), "cache": cache}
                outs.append(model(x[:, start:end], **call).logits[:, -1])
        return torch.cat(outs)

    want = run(original)
    near(run(model), want, 1e-6)
    near(run(model, static=True), want, 1e-6)
    if not getattr(original.config, "sliding_window", None):  # a window counts padding's places too
        near(want, logits(original, x[:, [0, 1, 2, 3, 5, 6]])[0, 4:], 1e-6)


@pytest.mark.parametrize("spec", ["iha", "sas"])
def test_one_cached_prompt_for_two_padded_endings(base, encoder, spec):
    if encoder:
        return
    original, prompt, endings = base(dtype=torch.float32), ids(1, 4), ids(2, 2, seed=4)
    endings[0, 0] = 0

    def run(model):
        with torch.no_grad():
            cache = model(prompt, use_cache=True).cache
        cache.batch_repeat_interleave(2)
        x = torch.cat((prompt.expand(2, -1), endings), 1)
        mask = torch.ones_like(x)
        mask[0, 4] = 0
        return model.generate(x, attention_mask=mask, cache=cache, max_new_tokens=6, do_sample=False, eos_token_id=None)

    assert torch.equal(run(grafted(original, spec, None)), run(original))
