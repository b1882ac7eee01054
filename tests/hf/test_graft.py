"""Grafting: the function is kept and measured, and a refused graft leaves no trace."""

import copy
import pickle

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, StableLmConfig, StableLmForCausalLM

from headloom.core.errors import HeadloomError
from headloom.hf import graft
from headloom.hf.grafting.graft import parse_layers
from headloom.mechanism import mechanisms

EXACT = {
    "gqa": ("gqa", {}),
    "carrier": ("iha", {"pseudo_heads": 2}),
    "carrier-virtual": ("iha", {"pseudo_heads": 3, "order": "virtual"}),
    "identity": ("iha", {"pseudo_heads": 3, "init": "identity"}),
    "head": ("iha", {"pseudo_heads": 2, "collapse": "head"}),
    "paired": ("iha", {"pseudo_heads": 2, "interaction": "paired"}),
    "sas": ("sas", {"simulated_heads": 8}),
    "sas-feature": ("sas", {"order": "feature_first", "kernel_size": 1}),
    "sas-full": ("sas", {"simulated_heads": 8, "aggregate": "full"}),
}
ROPES = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
}


def call(model, x, **kwargs):
    with torch.no_grad():
        return model(x, use_cache=False, **kwargs).logits


@pytest.mark.parametrize("spec", EXACT)
def test_exact_grafts_keep_the_logits(llama, ids, spec):
    name, options = EXACT[spec]
    model, x = llama(attention_bias=True), ids(2, 13)
    mask = torch.ones(2, 13, dtype=torch.long)
    mask[0, :5] = 0
    before, padded = call(model, x), call(model, x, attention_mask=mask)
    model = graft(model, name, **options)
    report = model.graft_report
    assert report.exact and report.relative < 1e-12
    torch.testing.assert_close(call(model, x), before, rtol=0, atol=1e-9)
    torch.testing.assert_close(call(model, x, attention_mask=mask)[mask.bool()], padded[mask.bool()], rtol=0, atol=1e-9)


@pytest.mark.parametrize("rope", ROPES)
def test_scaled_rotary_is_kept(llama, ids, rope):
    scaling = ROPES[rope] and {**ROPES[rope], "rope_theta": 10000.0}
    model, x = llama(rope_parameters=scaling), ids(1, 40)
    before = call(model, x)
    model = graft(model, "iha", pseudo_heads=2)
    torch.testing.assert_close(call(model, x), before, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grafts_in_the_models_type(llama, dtype):
    model = llama(dtype=dtype)
    model = graft(model, "iha", pseudo_heads=2)
    report = model.graft_report
    assert report.exact and model.dtype == dtype
    attention = model.model.layers[0].self_attn
    assert attention.q_mix.weight.dtype == torch.float32, "mixes stay wide"
    assert attention.q_proj.weight.dtype == dtype
    assert graft(llama(dtype=dtype), "sas").graft_report.exact


def test_report_says_what_changed(llama):
    model = llama()
    before = sum(p.numel() for p in model.parameters())
    model = graft(model, "iha", pseudo_heads=2, layers="0,2")
    report = model.graft_report
    H, G, P = 4, 2, 2
    added = 2 * (H * P * (H + 2 * G) + H * H * P)
    assert report.parameters_added == added
    assert report.parameters_before == before == sum(p.numel() for p in model.parameters()) - added
    assert [change.index for change in report.changes] == [0, 2]
    assert report.changes[0].config.init == "carrier"
    assert "iha in 2 of 3 layers" in str(report) and "its function is kept" in str(report)


def test_weights_stay_the_same_tensors_and_the_config_is_not_shared(llama):
    model = llama()
    twin = LlamaForCausalLM(model.config)
    q = model.model.layers[1].self_attn.q_proj.weight
    optimizer = torch.optim.SGD(model.parameters())
    model = graft(model, "iha", pseudo_heads=2)
    assert model.model.layers[1].self_attn.q_proj.weight is q
    assert all(any(p is x for x in model.parameters()) for p in optimizer.param_groups[0]["params"])
    assert type(model).__name__ == "HeadloomLlamaForCausalLM" and model.config.model_type == "llama"
    assert model.config is model.model.config
    assert type(twin.config) is LlamaConfig and twin.config._attn_implementation == "sdpa"
    assert "model.layers.1.self_attn.q_mix.weight" in model.state_dict()
    assert model(torch.tensor([[3, 4]]), output_hidden_states=True).hidden_states[-1].shape == (1, 2, 24)


def test_a_layers_config_is_read_once(llama, monkeypatch, tmp_path):
    """By the graft, and by loading it."""
    from headloom.hf.families.llama import Llama

    read, common = [], Llama.common

    def count(self, config, index):
        read.append(index)
        return common(self, config, index)

    monkeypatch.setattr(Llama, "common", count)
    grafted = graft(llama(), "iha", pseudo_heads=2, layers="0,2")
    assert read == [0, 2]
    grafted.save_pretrained(tmp_path)
    read.clear()
    type(grafted).from_pretrained(tmp_path)
    assert read == [0, 2]


def test_pseudo_heads_do_not_stay_copies(llama, ids):
    model, x = llama().train(), ids(2, 16)
    model = graft(model, "iha", pseudo_heads=2)
    start = {n: p.detach().clone() for n, p in model.named_parameters() if "_mix" in n}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(10):
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        optimizer.step()
    for name, before in start.items():
        if "q_mix" in name or "k_mix" in name:
            update = model.get_parameter(name).detach() - before
            apart = update - update.mean(1, keepdim=True)
            assert apart.norm() > 1e-3 * update.norm()


def test_the_same_graft_twice_is_the_same(llama):
    one, two = llama(), llama()
    one = graft(one, "iha", pseudo_heads=2)
    torch.manual_seed(123)
    two = graft(two, "iha", pseudo_heads=2)
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True))


def test_partial_graft_runs_the_other_layers_through_our_function(llama, ids):
    """Every mask form, dropout, generation and packing in a model whose layers 0 and 2 are the family's own."""
    model, x = llama(), ids(2, 9)
    plain = copy.deepcopy(model)
    model = graft(model, "iha", pseudo_heads=2, layers=[1])
    assert [type(layer.self_attn).__name__ for layer in model.model.layers] == [
        "LlamaAttention", "HeadloomLlamaAttention_iha", "LlamaAttention",
    ]  # fmt: skip
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    for given in (None, mask, torch.ones(9, 9, dtype=torch.bool).tril()[None, None]):
        real = mask.bool() if given is mask else torch.ones(2, 9, dtype=torch.bool)
        new, old = (call(m, x, attention_mask=given)[real] for m in (model, plain))
        torch.testing.assert_close(new, old, rtol=0, atol=1e-9)
    y = x.clone()
    y[:, -1] = (x[:, -1] + 1) % 37
    assert torch.equal(call(model, x)[:, :-1], call(model, y)[:, :-1])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = call(model, x[:1], position_ids=positions)
    torch.testing.assert_close(packed, call(plain, x[:1], position_ids=positions), rtol=0, atol=1e-9)
    settings = {"max_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    assert torch.equal(model.generate(x, **settings), plain.generate(x, **settings))
    model.set_attn_implementation("sdpa")
    with pytest.raises(HeadloomError, match="not grafted under attn_implementation='sdpa'"):
        call(model, x[:1], position_ids=positions)


def test_dropout_of_the_other_layers(llama, ids):
    model = llama(attention_dropout=0.5, dtype=torch.float32)
    model = graft(model, "gqa", layers=[0])
    assert model.model.layers[0].self_attn.config.dropout == 0.5
    x = ids(1, 6)
    assert torch.equal(call(model, x), call(model, x))
    model.train()
    outs = [call(model, x) for _ in range(2)]
    assert not torch.equal(*outs)


def test_a_mapping_of_layers(llama):
    model = llama()
    model = graft(model, layers={"0-1": ("iha", {"pseudo_heads": 2}), 2: "sas"})
    report = model.graft_report
    assert [c.mechanism for c in report.changes] == ["iha", "iha", "sas"]
    assert report.exact


def test_change_needs_permission(llama, ids):
    model, x = llama(), ids(1, 8)
    before = call(model, x)
    with pytest.raises(
        HeadloomError, match=r"iha with phase=virtual does not start as the attention it replaces.*allow_change"
    ):
        graft(model, "iha", pseudo_heads=2, phase="virtual", init="identity")
    assert torch.equal(call(model, x), before)
    model = graft(model, "iha", pseudo_heads=2, phase="virtual", init="identity", allow_change=True)
    report = model.graft_report
    assert not report.exact and report.relative > 1e-3
    assert "NOT kept" in str(report)


@pytest.mark.parametrize("option", [{"phase": "virtual"}, {"collapse": "mean"}], ids=["phase", "collapse"])
def test_an_option_is_refused_by_its_own_name_and_served_when_change_is_allowed(llama, option):
    """The init is graft's own choice: the refusal does not speak of it, and it goes with what was given."""
    (name, value) = next(iter(option.items()))
    with pytest.raises(HeadloomError, match=rf"^iha with {name}={value} does not start as the attention it replaces"):
        graft(llama(), "iha", pseudo_heads=2, **option)
    assert not graft(llama(), "iha", pseudo_heads=2, allow_change=True, **option).graft_report.exact


def test_what_a_mechanism_claims_is_measured(llama, monkeypatch, tree):
    model = llama()
    before = tree(model)
    monkeypatch.setattr(mechanisms()["iha"].config_cls, "exact", True)
    with pytest.raises(HeadloomError, match="iha as given changes the model: logits differ by"):
        graft(model, "iha", pseudo_heads=2, init="normal")
    assert tree(model) == before
    assert graft(model, "iha", pseudo_heads=2).graft_report.exact


def test_ternary_projections_keep_the_weights(llama):
    model = llama()
    q = model.model.layers[0].self_attn.q_proj.weight
    model = graft(model, "gqa", projection="bit", allow_change=True)
    report = model.graft_report
    assert not report.exact and model.model.layers[0].self_attn.q_proj.weight is q
    assert type(model.model.layers[0].self_attn.q_proj).__name__ == "BitLinear"


def refused(make):
    """(model, graft's arguments, what the error says)."""

    def grafted():
        return graft(make(), "gqa")

    def foreign():
        model = make()
        layer = model.model.layers[1]
        layer.self_attn.__class__ = type("Flashy", (type(layer.self_attn),), {})
        return model

    def adapted():
        model = make()
        model.model.layers[1].self_attn.q_proj = torch.nn.Sequential()
        return model

    def quantized():
        model = make()
        model.config.quantization_config = {"quant_method": "bitsandbytes"}
        return model

    def meta():
        with torch.device("meta"):
            return LlamaForCausalLM(make().config)

    def unknown():
        return StableLmForCausalLM(
            StableLmConfig(
                vocab_size=11, hidden_size=8, intermediate_size=9, num_hidden_layers=1, num_attention_heads=2
            )
        )

    def headed():
        model = make()
        model.__class__ = type("LlamaForSomething", (LlamaForCausalLM,), {})
        return model

    iha = {"name": "iha", "pseudo_heads": 2}
    return {
        "grafted": (grafted, iha, "already grafted"),
        "foreign": (foreign, iha, "layer 1's attention is a Flashy"),
        "adapted": (adapted, iha, "layer 1's q_proj is a Sequential"),
        "quantized": (quantized, iha, "a quantized model cannot be grafted"),
        "meta": (meta, iha, "meta device"),
        "family": (unknown, iha, "model family 'stablelm' is not known here: nothing says .* A family is one file in"),
        "head": (headed, iha, "LlamaForSomething cannot be grafted. Of family 'llama' these can: LlamaForCausalLM"),
        "module": (lambda: torch.nn.Linear(2, 2), iha, "graft takes a transformers model, not a Linear"),
        "range": (make, {**iha, "layers": "0-3,8"}, "layer 3 does not exist: the model has 3 layers, 0 to 2"),
        "word": (make, {**iha, "layers": "all"}, "layers 'all' cannot be read"),
        "empty": (make, {**iha, "layers": []}, "no layers were named"),
        "twice": (make, {"layers": {"0-1": "gqa", 1: "gqa"}}, "layer 1 is named twice"),
        "nothing": (make, {}, "name a mechanism: "),
        "unknown": (make, {"name": "ihaa"}, "unknown mechanism 'ihaa'. Did you mean 'iha'"),
        "option": (
            make,
            {"name": "iha", "pseudo_head": 2},
            "unknown option 'pseudo_head' of iha. Did you mean 'pseudo_heads'",
        ),
        "sizes": (make, {"name": "sas", "simulated_heads": 6}, "simulated_heads must be a multiple of num_heads 4"),
        "heads": (make, {"name": "mha"}, "base 'mha' has as many"),
        "projections": (make, {"name": "gqa", "num_kv_heads": 1, "allow_change": True}, r"layer 0's k_proj \(20, 24\)"),
        "bias": (make, {"name": "gqa", "qkv_bias": True, "allow_change": True}, "a bias on one side only"),
        "window": (make, {**iha, "window": 60}, "iha with window=60 does not start as"),
        "scale": (make, {"name": "gqa", "scale": 3.0}, "gqa with scale=3.0 does not start as"),
    }


@pytest.mark.parametrize("case", refused(None))
def test_refused_grafts_leave_the_model_as_it_was(llama, case, tree):
    build, arguments, message = refused(llama)[case]
    model = build()
    before = tree(model)
    with pytest.raises(HeadloomError, match=message):
        graft(model, **arguments)
    assert tree(model) == before


def test_parse_layers():
    assert parse_layers(None, 3) == [0, 1, 2]
    assert parse_layers("0-3,8", 9) == [0, 1, 2, 3, 8]
    assert parse_layers(" 1 , 0-1", 2) == [0, 1]
    assert parse_layers(1, 2) == [1] and parse_layers(range(2), 2) == [0, 1]
    with pytest.raises(HeadloomError, match="runs backwards"):
        parse_layers("3-1", 5)
    with pytest.raises(HeadloomError, match="layer -1 does not exist"):
        parse_layers([-1], 5)


def test_grafts_copy_and_pickle(llama, ids):
    model, x = llama(), ids(1, 5)
    model = graft(model, "iha", pseudo_heads=2)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(twin) is type(model) and type(twin.config) is type(model.config)
        assert torch.equal(call(twin, x), call(model, x))
