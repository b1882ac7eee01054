"""TRL's SFTTrainer on a graft: packed into one row without a mask, documents are told apart by restarting positions."""

import itertools

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import headloom as hl

trl = pytest.importorskip("trl", reason="TRL is not installed (pip install headloom[finetune])")

TEXTS = ["w5 w6 w7 w8", "w9 w10", "w11 w12 w13", "w5 w9 w6", "w14 w15 w16 w17 w18", "w7 w7"] * 2


@pytest.fixture(scope="module")
def tokenizer():
    raw = Tokenizer(models.WordLevel({f"w{i}": i for i in range(37)}, unk_token="w3"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w2", unk_token="w3")


def sft(model, tokenizer, folder, peft_config=None, **changes):
    settings = {
        "max_steps": 4,
        "max_length": 12,
        "per_device_train_batch_size": 12,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "activation_checkpointing": False,
        **changes,
    }
    given = {"train_dataset": Dataset.from_dict({"text": TEXTS}), "processing_class": tokenizer}
    return trl.SFTTrainer(model, args=trl.SFTConfig(str(folder), **settings), peft_config=peft_config, **given)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("spec", [("iha", {"pseudo_heads": 2}), ("sas", {"simulated_heads": 8})], ids=["iha", "sas"])
def test_it_trains_and_loads_again(llama, tokenizer, tmp_path, packing, spec):
    model = llama(dtype=torch.float32, num_hidden_layers=2)
    model = hl.graft(model, spec[0], layers=1, **spec[1])
    run = sft(model, tokenizer, tmp_path, packing=packing)
    run.train()
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    run.save_model(tmp_path / "model")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    assert all(torch.equal(tensor, back[key]) for key, tensor in model.state_dict().items())


def test_packed_texts_do_not_see_each_other(llama, tokenizer, tmp_path):
    """What the trainer gives to the model: the packed row's logits are those of every text alone."""
    model = llama(dtype=torch.float32, num_hidden_layers=2).eval()
    model = hl.graft(model, "iha", pseudo_heads=2)
    run = sft(model, tokenizer, tmp_path, packing=True)
    batch = next(iter(run.get_train_dataloader()))
    ids, positions = batch["input_ids"], batch["position_ids"]
    assert ids.shape[0] == 1 and "attention_mask" not in batch
    starts = [*(positions[0] == 0).nonzero()[:, 0].tolist(), ids.shape[1]]
    assert len(starts) > 4
    call = {key: value for key, value in batch.items() if key != "labels"}
    with torch.no_grad():
        packed = model.eval()(**call, use_cache=False).logits
        for start, end in itertools.pairwise(starts):
            alone = model(ids[:, start:end], use_cache=False).logits
            torch.testing.assert_close(packed[:, start:end], alone, rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_through_trl(llama, tokenizer, tmp_path):
    peft = pytest.importorskip("peft", reason="PEFT is not installed (pip install headloom[finetune])")
    model = llama(dtype=torch.float32, num_hidden_layers=2)
    model = hl.graft(model, "iha", pseudo_heads=2)
    mix = model.model.layers[0].self_attn.v_mix.weight.detach().clone()
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=hl.mix_names(model))
    run = sft(model, tokenizer, tmp_path, lora, packing=True)
    run.train()
    merged = run.model.merge_and_unload()
    assert not torch.equal(merged.model.layers[0].self_attn.v_mix.weight, mix)
    merged.save_pretrained(tmp_path / "merged")
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    assert all(torch.equal(tensor, back[key]) for key, tensor in merged.state_dict().items())
