"""transformers' own Trainer, as anyone calls it, on a graft: trains, resumes bit-equal, loads the best; bf16."""

import pytest
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import headloom as hl

SPECS = {"iha": ("iha", {"pseudo_heads": 2}), "sas": ("sas", {"simulated_heads": 8, "kernel_size": 3})}


@pytest.fixture
def grafted(llama):
    """grafted("iha", dtype=...): a small Llama whose second layer is grafted, in training mode."""

    def make(name="iha", **changes):
        model = llama(**{"dtype": torch.float32, "num_hidden_layers": 2, **changes})
        model = hl.graft(model, SPECS[name][0], layers=1, **SPECS[name][1])
        return model.train()

    return make


@pytest.fixture
def data(ids):
    return [{"input_ids": row, "labels": row} for row in ids(12, 8)]


def trainer(model, folder, data, **changes):
    settings = {
        "max_steps": 6,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "seed": 3,
        **changes,
    }
    return Trainer(model, TrainingArguments(str(folder), **settings), train_dataset=data, eval_dataset=data)


def losses(run):
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize("name", SPECS)
def test_six_steps_are_two_plus_four(grafted, data, tmp_path, name):
    """Checkpoints are folders that AutoModel loads; resumed from one, everything is bit-equal."""
    whole = trainer(grafted(name), tmp_path / "whole", data)
    whole.train()
    assert losses(whole)[-1] < losses(whole)[0]
    checkpoint = tmp_path / "whole" / "checkpoint-2"
    resumed = trainer(grafted(name), tmp_path / "resumed", data)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert losses(resumed) == losses(whole)
    wanted = whole.model.state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in resumed.model.state_dict().items())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "whole" / "checkpoint-6")
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in loaded.state_dict().items())
    start = grafted(name).state_dict()
    added = [key for key in start if ".1.self_attn." in key and "_proj" not in key]
    assert added and not any(torch.equal(start[key], wanted[key]) for key in added)


def test_the_best_checkpoint_comes_back(grafted, data, tmp_path):
    """Not the last one: here the best loss is called the greatest, which is the first."""
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    run = trainer(grafted(), tmp_path, data, eval_strategy="steps", eval_steps=2, **best)
    run.train()
    assert run.state.best_model_checkpoint.endswith("checkpoint-2")
    wanted = AutoModelForCausalLM.from_pretrained(run.state.best_model_checkpoint).state_dict()
    assert all(torch.equal(tensor, wanted[key]) for key, tensor in run.model.state_dict().items())


def test_groups_of_ours_in_their_trainer(grafted, data, tmp_path):
    model = grafted()
    run = trainer(model, tmp_path, data, max_steps=1, save_strategy="no")
    run.optimizer = torch.optim.AdamW(hl.parameter_groups(model, 0.1), lr=1e-2)
    run.train()
    mix = model.model.layers[1].self_attn.q_mix.weight
    assert [g["weight_decay"] for g in run.optimizer.param_groups] == [0.1, 0.0]
    assert any(p is mix for p in run.optimizer.param_groups[1]["params"])


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
def test_bf16_by_autocast(grafted, data, tmp_path, name, checkpointing):
    """Weights stay float32; with gradient checkpointing the losses are the same."""
    run = trainer(grafted(name), tmp_path, data, bf16=True, save_strategy="no", activation_checkpointing=checkpointing)
    run.train()
    assert {p.dtype for p in run.model.parameters()} == {torch.float32}
    plain = trainer(grafted(name), tmp_path, data, save_strategy="no")
    plain.train()
    got, wanted = torch.tensor(losses(run)), torch.tensor(losses(plain))
    assert got[-1] < got[0]
    torch.testing.assert_close(got, wanted, rtol=0.02, atol=0)


@pytest.mark.parametrize("name", SPECS)
def test_bf16_weights(grafted, data, tmp_path, name):
    """Pure bf16: everything is half except mixes, which would lose their zero sums."""
    model = grafted(name, dtype=torch.bfloat16)
    wide = {key for key, p in model.named_parameters() if p.dtype == torch.float32}
    assert wide == {key for key, _ in model.named_parameters() if "_mix" in key}
    run = trainer(model, tmp_path, data)
    run.train()
    assert losses(run)[-1] < losses(run)[0]
    back = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6")
    wanted = model.state_dict()
    assert all(torch.equal(t, wanted[key]) and t.dtype == wanted[key].dtype for key, t in back.state_dict().items())
