"""LoRA by PEFT on grafts of families that keep their projections otherwise than Llama does."""

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.auto import modeling_auto

import headloom as hl

peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install headloom[finetune])")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

IHA, SAS = ("iha", {"pseudo_heads": 2}), ("sas", {"simulated_heads": 8, "kernel_size": 3})
CASES = {
    "gpt_neox": (SAS, "CAUSAL_LM", ["query_key_value", "dense"], {}),
    "gpt2": (IHA, "CAUSAL_LM", ["c_attn", "c_proj"], {"fan_in_fan_out": True}),
    "bert": (IHA, None, ["query", "value"], {}),
}


@pytest.mark.parametrize("name", CASES, indirect=True)
def test_lora_trains_merges_and_comes_back(base, family, name, batch, tmp_path):
    (mechanism, options), task, targets, more = CASES[name]

    def fresh():
        model = base(num_hidden_layers=2)
        model = hl.graft(model, mechanism, layers=1, **options)
        return model

    plain, (x, _) = fresh(), batch
    names = tuple(f".{name}." for name in hl.mix_names(plain))
    added = {name for name, _ in plain.named_parameters() if any(part in name for part in names)}
    config = peft.LoraConfig(r=3, task_type=task, target_modules=targets, modules_to_save=hl.mix_names(plain), **more)
    model = peft.get_peft_model(plain, config).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(2):
        optimizer.zero_grad()
        model(x, labels=x).loss.backward()
        optimizer.step()
    wanted = model.eval()(x).logits
    model.save_pretrained(tmp_path / "adapter")
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {key.removeprefix("base_model.model.") for key in saved if "lora" not in key} == added

    merged = peft.PeftModel.from_pretrained(fresh(), tmp_path / "adapter").eval().merge_and_unload()
    merged.save_pretrained(tmp_path / "merged")
    auto = {cls: auto for auto, cls in family.head_classes().items()}[type(base())]
    again = getattr(modeling_auto, auto).from_pretrained(tmp_path / "merged").eval()
    assert type(merged) is type(again) is type(fresh())
    for one in (merged, again):
        torch.testing.assert_close(one(x).logits, wanted, rtol=0, atol=1e-10)

    before = dict(fresh().named_parameters())
    moved = {name for name, p in again.named_parameters() if not torch.equal(p, before[name])}
    lowered = {name for name in before if name.endswith(tuple(f"{target}.weight" for target in targets))}
    assert moved == lowered | added and len(lowered) >= 4
