"""Every way of generating that transformers has, on a graft: what docs/grafting.md says of it is what happens."""

import contextlib

import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ALL_CACHE_IMPLEMENTATIONS, GenerationMode

import headloom as hl
from headloom.core.errors import HeadloomError

GRAFTS = {"iha": ("iha", {"pseudo_heads": 2}), "sas": ("sas", {"kernel_size": 3})}
PROMPTS = torch.tensor([[0, 0, 5, 6, 7, 5, 6], [10, 9, 6, 7, 5, 8, 11]])
CALL = {"max_new_tokens": 6, "eos_token_id": None}
MODES = {
    "greedy_search": [{}],
    "sample": [{"do_sample": True}],
    "beam_search": [{"num_beams": 3}],
    "beam_sample": [{"num_beams": 3, "do_sample": True}],
    "assisted_generation": [{"assistant_model": True}, {"prompt_lookup_num_tokens": 2}, {"assistant_early_exit": 1}],
    "contrastive_search": [{"penalty_alpha": 0.6, "top_k": 4}],
    "dola_generation": [{"dola_layers": "high"}],
    "group_beam_search": [{"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}],
    "constrained_beam_search": [{"num_beams": 4, "force_words_ids": [[5]]}],
}


@pytest.fixture
def make(llama):
    def build(kind):
        model = llama(num_hidden_layers=2, head_dim=6)
        if kind is not None:
            model = hl.graft(model, GRAFTS[kind][0], **GRAFTS[kind][1])
        return model

    return build


class NoStream(contextlib.nullcontext):
    def wait_stream(self, other):
        """Everything is done in order."""


def generate(model, x, **how):
    torch.manual_seed(0)
    how = {**how, "assistant_model": model} if how.get("assistant_model") else how
    return model.generate(x, attention_mask=(x != 0).long(), **{**CALL, **how})


def test_the_page_lists_every_mode_and_cache(listed):
    modes = listed("mode")
    assert sorted(set(modes) - {"generate_batch"}) == sorted(mode.value for mode in GenerationMode)
    caches = listed("`cache_implementation`")
    assert sorted(caches) == sorted((*ALL_CACHE_IMPLEMENTATIONS, "paged"))
    assert {row[0] for row in (*modes.values(), *caches.values())} == {"works", "refused", "not here"}


@pytest.mark.parametrize("kind", GRAFTS)
@pytest.mark.parametrize("mode", [mode.value for mode in GenerationMode])
def test_a_mode_does_what_the_page_says(make, listed, kind, mode):
    said = listed("mode")[mode][0]
    model, original = make(kind), make(None)
    for how in MODES[mode]:
        config = GenerationConfig(**{key: value for key, value in how.items() if key != "assistant_model"})
        assert config.get_generation_mode(how.get("assistant_model")) == mode
        x = PROMPTS[1:] if mode == "assisted_generation" else PROMPTS  # transformers assists one row at a time
        if said == "works":
            assert torch.equal(generate(model, x, **how), generate(original, x, **how))
        else:
            assert said == "not here"
            with pytest.raises(ValueError, match="requires `trust_remote_code=True`"):
                generate(model, x, **how)


@pytest.mark.parametrize("kind", GRAFTS)
@pytest.mark.parametrize("cache", [*ALL_CACHE_IMPLEMENTATIONS, "paged"])
def test_a_cache_does_what_the_page_says(make, listed, monkeypatch, kind, cache):
    said = listed("`cache_implementation`")[cache][0]
    model, wanted = make(kind), generate(make(None), PROMPTS)
    how = {"cache_implementation": cache}
    if said == "refused":
        with pytest.raises(HeadloomError, match=r"generate_batch.*left-padded"):
            generate(model, PROMPTS, **how)
    elif cache == "quantized":
        how["cache_config"] = {"backend": "fp8"}
        more = {"output_logits": True, "return_dict_in_generate": True}
        got, exact = (torch.stack(generate(model.float(), PROMPTS, **h, **more).logits) for h in (how, {}))
        torch.testing.assert_close(got[0], exact[0], rtol=0, atol=1e-5)  # the prompt is read before it is rounded
        assert float((got[1] - exact[1]).abs().max()) < 0.2 * float(exact[1].max() - exact[1].min())
    else:
        if "offloaded" in cache:  # transformers moves these by a GPU's streams
            monkeypatch.setattr(torch, "Stream", NoStream)
            monkeypatch.setattr(torch.cuda, "default_stream", lambda device: NoStream())
        assert torch.equal(generate(model, PROMPTS, **how), wanted)


@pytest.mark.parametrize("kind", GRAFTS)
def test_continuous_batching_is_refused_before_it_starts(make, listed, kind):
    assert listed("mode")["generate_batch"][0] == "refused"
    model = make(kind)
    with pytest.raises(HeadloomError, match=r"generate_batch.*left-padded"):
        model.generate_batch([[5, 6, 7]], max_new_tokens=2)
    with (
        pytest.raises(HeadloomError, match=r"generate_batch.*left-padded"),
        model.continuous_batching_context_manager(),
    ):
        pass
