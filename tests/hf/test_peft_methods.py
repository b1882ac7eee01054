"""Every method of PEFT on a graft: what docs/grafting.md says of it is what happens."""

import pytest
import torch

import headloom as hl
from headloom.core.errors import HeadloomError

peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install headloom[finetune])")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")

LAYERS, TOKENS = 2, torch.tensor([[5, 6, 7, 8, 9, 5, 10], [10, 9, 6, 7, 5, 8, 11]])
GRAFTS = {"iha": ("iha", {"pseudo_heads": 2}), "sas": ("sas", {"kernel_size": 3})}
PROJECTIONS = {"target_modules": ["q_proj", "v_proj"]}
PROMPT = {"num_virtual_tokens": 3}
OPTIONS = {  # what PEFT's defaults are too large for here, or what it asks for
    "ADALORA": {**PROJECTIONS, "total_step": 10},
    "ADAMSS": {**PROJECTIONS, "r": 3, "num_subspaces": 2},
    "ADAPTION_PROMPT": {"adapter_len": 3, "adapter_layers": 1},
    "C3A": {**PROJECTIONS, "block_size": 4},
    "CARTRIDGE": PROMPT,
    "CPT": {"cpt_token_ids": [3, 4, 5, 6], "cpt_mask": [1] * 4, "cpt_tokens_type_mask": [1, 2, 3, 4]},
    "FOURIERFT": {**PROJECTIONS, "n_frequency": 20},
    "IA3": {**PROJECTIONS, "feedforward_modules": []},
    "LN_TUNING": {},
    "MISS": {**PROJECTIONS, "r": 4},
    "MULTITASK_PROMPT_TUNING": {**PROMPT, "num_tasks": 2, "num_ranks": 1},
    "POLY": {**PROJECTIONS, "n_tasks": 2},
    "PREFIX_TUNING": PROMPT,
    "PROMPT_TUNING": PROMPT,
    "PSOFT": {**PROJECTIONS, "r": 4},
    "P_TUNING": {**PROMPT, "encoder_hidden_size": 8},
    "ROAD": {**PROJECTIONS, "group_size": 4},
    "SHADOW": {"shadow_num_hidden_layers": LAYERS},
    "SHIRA": {**PROJECTIONS, "r": 4},
    "TRAINABLE_TOKENS": {"token_indices": [5, 6, 7]},
    "VBLORA": {**PROJECTIONS, "vector_length": 4, "num_vectors": 16},
    "WAVEFT": {**PROJECTIONS, "n_frequency": 20},
}
TASKS = ("MULTITASK_PROMPT_TUNING", "POLY")  # need the number of a task with every row
SINGLE = ("PSOFT",)  # refuses float64
OWN_ATTENTION = ("SHADOW",)  # a second model, grafted too: its adapter holds mixes that the original's has not


@pytest.fixture
def make(llama):
    """make(None or a name of GRAFTS, **options): the original with its weights, or a graft of it."""

    def build(kind, dtype=torch.float64, **options):
        model = llama(num_hidden_layers=LAYERS, head_dim=6, dtype=dtype)
        model.config.use_cache = False  # X-LoRA asks for it
        if kind is not None:
            torch.manual_seed(0)
            model = hl.graft(model, GRAFTS[kind][0], **{**GRAFTS[kind][1], **options})
        return model

    return build


def adapter(name, folder, original=None, **changes):
    """The config of a method; X-LoRA's experts are written into `folder`."""
    options = {**OPTIONS.get(name, PROJECTIONS), **changes}
    if name == "XLORA":
        torch.manual_seed(1)
        lora = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, **PROJECTIONS)
        experts = peft.get_peft_model(original, lora, "0")
        experts.add_adapter("1", lora)
        experts.save_pretrained(folder)
        options = {"hidden_size": 24, "adapters": {key: str(folder / key) for key in "01"}}
    return peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType[name]](task_type="CAUSAL_LM", **options)


def call(name):
    return {"task_ids": torch.tensor([0, 1])} if name in TASKS else {}


@torch.no_grad()
def logits(model, name):
    labels = {"labels": None} if name == "CPT" else {}  # which it asks for
    return model.eval()(input_ids=TOKENS, **call(name), **labels).logits


def trained(model, name):
    """One large step of all that the method trains."""
    torch.manual_seed(2)
    named = model.train().named_parameters()
    own = [p for key, p in named if p.requires_grad and "ranknum" not in key]  # AdaLoRA's count, which PEFT never saves
    optimizer = torch.optim.AdamW(own, lr=0.05)
    model(input_ids=TOKENS, labels=TOKENS.clone(), **call(name)).loss.backward()
    given = [p.grad for p in own if p.grad is not None]
    assert len(given) == len(own) or name in OWN_ATTENTION  # whose last layer hands its state to nobody
    assert 0 < sum(float(grad.abs().sum()) for grad in given) < float("inf")
    optimizer.step()
    return model


def loaded(model, name, folder, first):
    """`first`'s adapter, from its folder, on another model."""
    if name != "XLORA":
        return peft.PeftModel.from_pretrained(model, folder)
    back = peft.get_peft_model(model, first.peft_config["default"])  # PEFT reads no X-LoRA classifier back
    back.load_state_dict(first.state_dict(), strict=False)
    return back


def test_the_page_lists_every_method(listed):
    page = listed("PEFT method (`PeftType`)")
    assert sorted(page) == sorted(method.name for method in peft.PeftType)
    assert {word for row in page.values() for word in row[:2]} == {"works", "refused"}


@pytest.mark.parametrize("kind", GRAFTS)
@pytest.mark.parametrize(
    ("name", "more"), [*((method.name, {}) for method in peft.PeftType), ("LORA", {"use_dora": True})]
)
def test_a_method_does_what_the_page_says(make, listed, tmp_path, name, more, kind):
    page = listed("PEFT method (`PeftType`)")
    said, dtype = page[name][list(GRAFTS).index(kind)], torch.float32 if name in SINGLE else torch.float64
    if name == "ADAMSS":
        pytest.importorskip("sklearn", reason="PEFT's AdaMSS needs scikit-learn")
    config = adapter(name, tmp_path, make(kind), **more)
    torch.manual_seed(3)
    if said == "refused":
        with pytest.raises(HeadloomError, match=r"LoRA.*prompt tuning"):
            peft.get_peft_model(make(kind), config)(input_ids=TOKENS)
        return
    model = peft.get_peft_model(make(kind, dtype), config)
    before = logits(model, name)
    after = logits(trained(model, name), name)
    assert float((after - before).abs().max()) > 1e-4, "the adapter changes what the model says"
    model.save_pretrained(tmp_path / "adapter")
    back = logits(loaded(make(kind, dtype), name, tmp_path / "adapter", model), name)
    torch.testing.assert_close(back, after, rtol=0, atol=1e-10)
    if name in OWN_ATTENTION:
        torch.testing.assert_close(before, logits(make(None), name), rtol=0, atol=1e-10)
        return
    atol = 1e-4 if name in SINGLE else 1e-5
    original = logits(loaded(make(None, dtype), name, tmp_path / "adapter", model), name)
    torch.testing.assert_close(original, after, rtol=0, atol=atol)  # some adapters compute in float32


@pytest.mark.parametrize(
    ("kind", "options", "works"),
    [("sas", {"cache": "base"}, True), ("iha", {"cache": "expanded"}, False)],
)
def test_a_prefix_needs_a_cache_of_the_original_keys(make, tmp_path, kind, options, works):
    model = peft.get_peft_model(make(kind, **options), adapter("PREFIX_TUNING", tmp_path))
    if works:
        before = logits(model, "PREFIX_TUNING")
        assert float((logits(trained(model, "PREFIX_TUNING"), "PREFIX_TUNING") - before).abs().max()) > 1e-4
    else:
        with pytest.raises(HeadloomError, match=r"layer 0.*cache='base'"):
            logits(model, "PREFIX_TUNING")


def test_a_prefix_is_no_state_of_constant_size(llama, tmp_path):
    model = llama(num_hidden_layers=LAYERS, head_dim=6)
    model = hl.graft(model, "linear", allow_change=True)
    with pytest.raises(HeadloomError, match=r"keys and values of 3 tokens for layer 0.*a state of constant size"):
        logits(peft.get_peft_model(model, adapter("PREFIX_TUNING", tmp_path)), "PREFIX_TUNING")


def test_a_cache_that_the_original_filled(make):
    """What prefix tuning does, by hand: iha goes on from the original's cache, sas says that it cannot."""
    with torch.no_grad():
        whole = make(None)(TOKENS).logits[:, 4:]
        for kind in GRAFTS:
            cache = make(None)(TOKENS[:, :4], use_cache=True).cache
            if kind == "sas":
                with pytest.raises(HeadloomError, match="2 heads of width 6 and 2 heads of width 6 for layer 0"):
                    make(kind)(TOKENS[:, 4:], cache=cache)
            else:
                torch.testing.assert_close(make(kind)(TOKENS[:, 4:], cache=cache).logits, whole, rtol=0, atol=1e-10)


def test_a_shadow_of_fewer_layers_is_refused(make, tmp_path):
    with pytest.raises(HeadloomError, match="describes 2 layers' attention, the llama model has 1: give"):
        peft.get_peft_model(make("iha"), adapter("SHADOW", tmp_path, shadow_num_hidden_layers=None))


def test_unknown_names_of_a_config_are_said():
    config = hl.attention("iha", 24, 4).config
    with pytest.raises(HeadloomError, match=r"IHAConfig has no 'nun_heads'\. Did you mean 'num_heads'"):
        _ = config.nun_heads
    assert not hasattr(config, "num_attention_heads") and getattr(config, "hidden", 7) == 7
