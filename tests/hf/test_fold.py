"""Folding: plain weights that compute the same, or a reason why there are none."""

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

import headloom as hl
from headloom.core.errors import HeadloomError


def grafted(llama, name="iha", *, dtype=torch.float64, layers=None, sizes=None, **options):
    """A graft with every mix, and what else it adds, away from its initial value."""
    model = llama(dtype=dtype, **(sizes or {}))
    model = hl.graft(model, name, layers=layers, allow_change=True, **{"pseudo_heads": 1, **options})
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in (p for a in model.grafted() for n, p in a.named_parameters() if "_mix" in n):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model


def states(model, x):
    """Before the final norm, which rounds to float32 in every Llama."""
    with torch.no_grad():
        return model(x, output_hidden_states=True, use_cache=False).hidden_states[-2]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"collapse": "head"}, {"collapse": "mean"}, {"interaction": "paired"}, {"order": "virtual"}],
    ids=lambda o: "-".join(o.values()) or "full",
)
def test_one_pseudo_head_is_plain_attention(llama, ids, kv_heads, bias, options):
    model = grafted(llama, sizes={"kv_heads": kv_heads, "attention_bias": bias}, **options)
    x = ids(2, 9)
    before, plain = states(model, x), states(llama(kv_heads=kv_heads, attention_bias=bias), x)
    assert (before - plain).abs().max() > 0.1, "the mixes matter"
    model = hl.fold(model)
    report = model.fold_report
    assert type(model) is LlamaForCausalLM and type(model.config).__name__ == "LlamaConfig"
    assert not hasattr(model.config, "headloom") and model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(states(model, x), before, rtol=0, atol=1e-12)
    assert report.difference < 1e-9 and report.layers == (0, 1, 2)
    assert (report.kv_heads_before, report.kv_heads) == (kv_heads, 4)
    assert (f"4 key/value heads instead of {kv_heads}: the cache is {4 // kv_heads} times" in str(report)) is (
        kv_heads != 4
    )
    assert report.parameters == sum(p.numel() for p in model.parameters())


def test_layers_that_were_not_grafted_get_the_same_heads(llama, ids):
    model, x = grafted(llama, layers="1"), ids(2, 9)
    before = states(model, x)
    model = hl.fold(model)
    assert model.fold_report.layers == (1,)
    torch.testing.assert_close(states(model, x), before, rtol=0, atol=1e-12)
    k = model.model.layers[0].self_attn.k_proj.weight.unflatten(0, (4, -1))
    assert torch.equal(k[0], k[1]) and torch.equal(k[2], k[3]) and not torch.equal(k[1], k[2])


def test_a_plain_graft_keeps_its_kv_heads_and_weights(llama, ids):
    model, original = llama(), llama()
    model = hl.graft(model, "gqa")
    model = hl.fold(model)
    report = model.fold_report
    assert (report.kv_heads, report.parameters) == (2, report.parameters_before)
    for name, parameter in original.named_parameters():
        assert torch.equal(model.get_parameter(name), parameter), name
    torch.testing.assert_close(model(ids(2, 9)).logits, original(ids(2, 9)).logits, rtol=0, atol=1e-12)


def test_the_folder_loads_without_headloom(llama, ids, tmp_path):
    model, x = grafted(llama), ids(2, 9)
    model = hl.fold(model)
    model.save_pretrained(tmp_path)
    code = (
        "import sys, torch; from transformers import AutoModelForCausalLM as A\n"
        f"model = A.from_pretrained({str(tmp_path)!r}).eval(); x = torch.tensor({x.tolist()})\n"
        "out = model.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)\n"
        "print(type(model).__name__, 'headloom' in sys.modules, out.tolist(), model(x).logits.double().sum().item())"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    name, known, rest = done.stdout.strip().split(" ", 2)
    assert (name, known) == ("LlamaForCausalLM", "False")
    out = model.generate(x, max_new_tokens=5, do_sample=False, pad_token_id=0)
    tokens, _, total = rest.rpartition(" ")
    assert tokens == str(out.tolist())
    assert float(total) == pytest.approx(model(x).logits.double().sum().item(), rel=1e-6)


def test_a_folded_model_is_a_model_of_its_family(llama, ids):
    model = grafted(llama)
    model = hl.fold(model)
    assert len(model(ids(1, 5), output_hidden_states=True).hidden_states) == 4
    assert model(ids(1, 5), output_attentions=True, use_cache=False).attentions is not None
    model(ids(1, 5), labels=ids(1, 5)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    model = hl.graft(model, "iha", pseudo_heads=2)
    assert model.grafted()[0].config.num_kv_heads == 4


@pytest.mark.parametrize(("name", "extra"), [("mfa", {}), ("mfa_kr", {}), ("gqa", {"num_kv_heads": 2})])
def test_models_of_our_own_fold_too(name, extra, mixed, ids, tmp_path):
    options = {"latent_dim": 14} if name.startswith("mfa") else extra
    model = mixed([(name, options)] * 2)
    x = ids(2, 9)
    before = model(x).logits
    model = hl.fold(model)
    report = model.fold_report
    # the family's cos and sin are float32, ours were wider
    torch.testing.assert_close(model(x).logits, before, rtol=0, atol=1e-5 * (before.max() - before.min()).item())
    assert report.relative < 1e-5 and model.config.head_dim == (14 if "latent_dim" in options else 10)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert type(again) is LlamaForCausalLM
    torch.testing.assert_close(again(x).logits, model(x).logits, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_types(llama, ids, dtype):
    model = llama(dtype=dtype)
    model = hl.graft(model, "iha", pseudo_heads=1)
    with torch.no_grad():
        for parameter in (p for n, p in model.named_parameters() if "_mix" in n):
            parameter.add_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
    model = hl.fold(model)
    report = model.fold_report
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert report.relative < (1e-5 if dtype == torch.float32 else 5e-2)


REFUSED = [
    ({"pseudo_heads": 2}, "layer 1 cannot be folded .* not foldable: q_mix, k_mix, v_mix, out_mix, because 2 pseudo"),
    ({"window": 3}, "layer 1 has window=3, which a plain llama layer cannot have"),
    ({"softcap": 5.0}, "softcap=5.0"),
    ({"scale": 0.2}, "scale=0.2"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED, ids=lambda o: next(iter(o)) if isinstance(o, dict) else "")
def test_refusals_leave_the_model_as_it_was(llama, options, message, tree):
    model = grafted(llama, layers={1: ("iha", {"pseudo_heads": 1, **options}), 2: "iha"})
    before = tree(model)
    with pytest.raises(HeadloomError, match=message):
        hl.fold(model)
    assert tree(model) == before


def test_a_fold_is_measured(llama, monkeypatch, tree):
    import headloom.hf.grafting.fold as folding

    model = grafted(llama)
    before = tree(model)
    monkeypatch.setattr(folding, "largest_difference", lambda *_: (1.0, 1.0))
    with pytest.raises(HeadloomError, match="more than rounding"):
        hl.fold(model)
    assert tree(model) == before


@pytest.mark.parametrize("name", ["talking_heads", "sas", "deltaformer"])
def test_what_mixes_scores_or_tokens_does_not_fold(llama, name):
    model = llama()
    model = hl.graft(model, name)
    with pytest.raises(HeadloomError, match="no linear map of one token's"):
        hl.fold(model)
    with pytest.raises(HeadloomError, match="only a grafted model can be folded, not a LlamaForCausalLM"):
        hl.fold(llama())


def test_a_config_says_what_folds():
    sizes = {"hidden_size": 8, "num_heads": 4, "pseudo_heads": 1}
    full = hl.foldable("iha", **sizes)
    assert full.complete and list(full.folds) == ["q_mix", "k_mix", "v_mix", "out_mix"]
    assert str(full).startswith("q_mix folds into W_Q: only an optimiser effect; k_mix folds into W_K: only")
    wider = hl.foldable("iha", **sizes, num_kv_heads=2)
    assert wider.folds["v_mix"] == "W_V, of 4 key/value heads instead of 2"
    part = hl.foldable("iha", **sizes, qk_norm="head")
    assert (list(part.folds), list(part.stays)) == (["v_mix", "out_mix"], ["q_mix", "k_mix"])
    assert "not foldable: q_mix, k_mix, because the norm" in str(part)
    assert not hl.foldable("iha", **sizes, base="tpa").folds
    assert not hl.foldable("iha", **{**sizes, "pseudo_heads": 2}).folds
    assert list(hl.foldable("iha", **sizes, collapse="mean").folds) == ["q_mix", "k_mix", "v_mix"]
    assert "quantise" in str(hl.foldable("iha", **sizes, projection="bit"))
    assert str(hl.foldable("mha", hidden_size=8, num_heads=2)) == "plain attention: there is nothing to fold"
    assert not hl.foldable("mfa_kr", hidden_size=8, num_heads=2, qk_norm="head").complete


def test_every_mechanism_has_an_answer():
    complete = {name for name, info in hl.mechanisms().items() if info.config_cls.tiny().folding.complete}
    assert complete == {"mha", "gqa", "mqa", "mfa", "mfa_kr"}
    assert all(str(info.config_cls.tiny().folding) for info in hl.mechanisms().values())
