"""LoRA by PEFT on a graft: what a mechanism adds trains whole, is saved, reloaded and merged."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import headloom as hl

peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install headloom[finetune])")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

KINDS = {
    "iha": ("iha", {"pseudo_heads": 2}),
    "sas": ("sas", {"simulated_heads": 8, "kernel_size": 3}),
    "talking_heads": ("talking_heads", {}),
}


def lora(model, **more):
    names = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": hl.mix_names(model)}
    return peft.get_peft_model(model, peft.LoraConfig(r=3, task_type="CAUSAL_LM", **{**names, **more}))


def train(model, x, steps=5):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        loss = model(x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss


def test_names_come_from_the_modules(llama, mixed):
    model = llama(num_hidden_layers=3)
    model = hl.graft(model, layers={"0": ("iha", {"pseudo_heads": 2}), "2": ("sas", {"simulated_heads": 8})})
    pairs = [f"{part}.{i}" for part in ("head_q", "head_k", "head_v", "feature_q", "feature_k") for i in (0, 1)]
    assert hl.mix_names(model) == ["q_mix", "k_mix", "v_mix", "out_mix", *pairs]
    assert hl.mix_names(mixed([("mha", {}), ("mla", {})])) == []
    vectors = [f"lambda_{name}" for name in ("q1", "k1", "q2", "k2")]
    assert hl.mix_names(mixed([("diff", {}), ("diff", {})])) == [*vectors, "head_norm"]
    assert hl.mix_names(mixed([("deltaformer", {})])) == ["beta_proj"]


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_lora_trains_saves_reloads_and_merges(llama, ids, tmp_path, kind):
    def fresh():
        model = llama(num_hidden_layers=2)
        model = hl.graft(model, kind[0], layers=1, **kind[1])
        return model

    base, x = fresh(), ids(4, 9)
    before = {name: p.clone() for name, p in base.named_parameters()}
    names = hl.mix_names(base)
    model = lora(base)
    with torch.no_grad():
        torch.testing.assert_close(model(x).logits, fresh()(x).logits, rtol=0, atol=1e-12)
    train(model.train(), x)
    with torch.no_grad():
        wanted = model.eval()(x).logits

    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {key for key in saved if "lora" not in key} == {
        f"base_model.model.model.layers.1.self_attn.{key}" for key in _added(fresh(), names)
    }, "every added tensor is in the adapter, and nothing else beside the low-rank pairs"

    back = peft.PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval()
    merged = back.merge_and_unload()
    assert type(merged) is type(fresh())
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    for one in (merged, again):
        torch.testing.assert_close(one(x).logits, wanted, rtol=0, atol=1e-12)

    moved = {name for name, p in again.named_parameters() if not torch.equal(p, before[name])}
    lowered = {f"model.layers.{i}.self_attn.{letter}_proj.weight" for i in (0, 1) for letter in "qv"}
    assert moved == lowered | {f"model.layers.1.self_attn.{key}" for key in _added(fresh(), names)}


def _added(model, names):
    """State-dict names inside the attention of what it adds."""
    attention = model.model.layers[1].self_attn
    return {key for key in attention.state_dict() if key.startswith(tuple(f"{name}." for name in names))}


def test_half_models_keep_their_mixes_wide(llama, ids):
    model = llama(dtype=torch.bfloat16, num_hidden_layers=1)
    model = hl.graft(model, "iha", pseudo_heads=2)
    adapted, x = lora(model), ids(4, 9)
    mix = adapted.base_model.model.model.layers[0].self_attn.v_mix
    start = mix.weight.detach().clone()
    first = train(adapted, x, 1)
    assert train(adapted, x, 5) < first
    assert mix.weight.dtype == torch.float32 and not torch.equal(mix.weight, start)


def test_an_adapter_finds_its_saved_graft(llama, ids, tmp_path):
    base, x = llama(num_hidden_layers=1), ids(4, 9)
    base = hl.graft(base, "iha", pseudo_heads=2)
    base.save_pretrained(tmp_path / "graft")
    model = lora(AutoModelForCausalLM.from_pretrained(tmp_path / "graft"))
    train(model, x)
    model.save_pretrained(tmp_path / "adapter")
    back = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    torch.testing.assert_close(back(x).logits, model(x).logits, rtol=0, atol=1e-12)
