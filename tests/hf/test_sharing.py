"""A graft beside its original: one set of weights, and whatever else belongs to each of them alone."""

import copy
import functools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

import headloom as hl
from headloom.core.errors import HeadloomError

IHA = {"name": "iha", "pseudo_heads": 2}


def call(model, x, **kwargs):
    with torch.no_grad():
        return model(x, use_cache=False, **kwargs).logits


def storages(*models):
    """Of all tensors of the models: address -> bytes."""
    tensors = [t for m in models for t in (*m.parameters(), *m.buffers())]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


@pytest.mark.parametrize("layers", [None, 1])
def test_the_original_stays_as_it_was(llama, ids, tree, layers):
    """In training mode but for one module, half frozen, with a gradient, checkpointing and outputs captured once."""
    model, x = llama(dtype=torch.float32, attention_dropout=0.5), ids(2, 9)
    before = call(model, x)
    model(x, labels=x, output_hidden_states=True).loss.backward()
    model.train()
    model.model.norm.eval()
    model.activation_checkpointing_enable()
    model.model.embed_tokens.requires_grad_(False)
    model.generation_config.max_new_tokens = 3
    seen = tree(model)
    grafted = hl.graft(model, **IHA, layers=layers)
    assert tree(model) == seen and type(model) is LlamaForCausalLM
    flags = [(path, module.training) for path, module in model.named_modules()]
    assert [(path, grafted.get_submodule(path).training) for path, _ in flags] == flags
    assert grafted.is_activation_checkpointing and grafted.generation_config.max_new_tokens == 3
    assert grafted.generation_config is not model.generation_config
    configs = [vars(module)["config"] for module in grafted.modules() if "config" in vars(module)]
    assert all(c is grafted.config for c in configs if isinstance(c, LlamaConfig)) and type(model.config) is LlamaConfig
    assert type(grafted.config).__name__ == "HeadloomLlamaConfig"
    assert all(mix.training for mix in grafted.model.layers[1].self_attn.children())
    assert torch.equal(call(model.eval(), x), before)
    assert torch.equal(model.generate(x[:1], do_sample=False), grafted.eval().generate(x[:1], do_sample=False))


def test_one_set_of_weights(llama):
    """Every tensor of the original is the graft's too; the graft adds its mixes and nothing else."""
    model = llama()
    alone = storages(model)
    grafted = hl.graft(model, **IHA)
    both = storages(model, grafted)
    added = grafted.graft_report.parameters_added * 8
    assert sum(both.values()) == sum(alone.values()) + added
    for name, tensor in (*model.named_parameters(remove_duplicate=False), *model.named_buffers()):
        path, _, leaf = name.rpartition(".")
        assert getattr(grafted.get_submodule(path), leaf) is tensor, name
    assert grafted.lm_head.weight is grafted.model.embed_tokens.weight is model.lm_head.weight
    assert not set(model.modules()) & set(grafted.modules())


class Allocated(TorchDispatchMode):
    """Bytes of new storages that operations return, freed again or not."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves((args, kwargs)) if is_real(t)}
        out = function(*args, **(kwargs or {}))
        for t in torch.utils._pytree.tree_leaves(out):
            if is_real(t) and t.untyped_storage().data_ptr() not in given:
                self.bytes += t.untyped_storage().nbytes()
        return out


def is_real(value):
    return isinstance(value, torch.Tensor) and not value.is_meta


@pytest.mark.parametrize("folded", [False, True])
def test_it_needs_no_memory_of_a_second_model(folded):
    """All that is ever allocated on the way, the probe batch's activations included, is a part of the weights."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(vocab_size=40000, **sizes)).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    if folded:
        model = hl.graft(model, "iha", pseudo_heads=1)
    with Allocated() as allocated:
        made = hl.fold(model) if folded else hl.graft(model, **IHA)
    assert allocated.bytes < 0.5 * weights
    assert made.embed_tokens.weight is model.embed_tokens.weight


def test_training_the_graft_trains_the_shared_weights(llama, ids):
    """As the documentation says; two models that train apart start from a deep copy."""
    model, x = llama().train(), ids(2, 9)
    apart = hl.graft(copy.deepcopy(model), **IHA)
    grafted = hl.graft(model, **IHA)
    before = call(model, x)
    for other, moves in ((apart, False), (grafted, True)):
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(x, labels=x).loss.backward()
        optimizer.step()
        assert torch.equal(call(model, x), before) is not moves


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks so
def test_modules_are_not_shared(llama, ids):
    """What is put into the modules of one, such as adapters, or set on them, is not in the other."""
    from peft import LoraConfig, get_peft_model

    model, x = llama(), ids(1, 6)
    before = call(model, x)
    seen = [(path, type(module)) for path, module in model.named_modules()]
    tuned = get_peft_model(hl.graft(model, **IHA), LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    tuned.base_model.model.set_attn_implementation("eager")
    assert (call(tuned, x) - before).abs().max() > 1e-3
    assert [(path, type(module)) for path, module in model.named_modules()] == seen
    assert model.config._attn_implementation == "sdpa" and torch.equal(call(model, x), before)


# ---- hooks and attributes ----------------------------------------------------------------------------------------
class Doubling(nn.Module):
    """A hook that belongs to a module: its method."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def hook(self, module, args, output):
        self.calls += 1
        return output * 2


def test_hooks_come_along_and_do_not_see_the_probe(llama, ids):
    model, x, calls = llama(), ids(1, 6), []
    model.doubling = Doubling()
    model.model.norm.register_forward_hook(model.doubling.hook)
    model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: calls.append(module))
    before = call(model, x)
    calls.clear()
    grafted = hl.graft(model, **IHA)
    assert not calls and (model.doubling.calls, grafted.doubling.calls) == (1, 1)
    torch.testing.assert_close(call(grafted, x), before, rtol=0, atol=1e-9)
    assert calls == [grafted.model.layers[0].mlp], "a plain function is called by both"
    assert (model.doubling.calls, grafted.doubling.calls) == (1, 2), "a method belongs to the copy of its module"


def test_outputs_are_captured_anew(llama, ids):
    """transformers' hooks are on the modules of the original, and no outputs are recorded twice or not at all."""
    model, x = llama(), ids(1, 6)
    model.set_attn_implementation("eager")
    for made in (hl.graft, lambda m, **given: hl.fold(hl.graft(m, "gqa"))):
        model(x, output_hidden_states=True, output_attentions=True)
        other = made(model, name="gqa")
        other.set_attn_implementation("eager")
        out = other(x, output_hidden_states=True, output_attentions=True)
        assert len(out.hidden_states) == 4 and len(out.attentions) == 3


def lock(model):
    model.model.layers[0].guard = threading.Lock()


def hook(model):
    model.model.layers[1].self_attn.register_forward_hook(lambda *given: None)


def patched(model):
    model.model.forward = functools.partial(LlamaModel.forward, model.model)


def compiled(model):
    layer = model.model.layers[1].mlp
    layer.forward = lambda x: layer.down_proj(x)


def spread(model):
    from accelerate.hooks import AlignDevicesHook, add_hook_to_module

    add_hook_to_module(model.model.layers[0].mlp, AlignDevicesHook("cpu"))


REFUSED = {
    "lock": (lock, r"model.layers.0.guard cannot be copied \(cannot pickle '_thread.lock' object\).*delete it first"),
    "hook": (hook, "layer 1's attention has hooks, and it is replaced: remove them"),
    "forward": (patched, "the forward of model was replaced .*: undo that"),
    "inner": (compiled, "the forward of model.layers.1.mlp was replaced"),
    "accelerate": (spread, "spread over devices by accelerate cannot be grafted or folded: load it on one device"),
}


@pytest.mark.parametrize("how", ["graft", "fold"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_copied_is_said(llama, tree, case, how):
    spoil, message = REFUSED[case]
    model = hl.graft(llama(), "gqa") if how == "fold" else llama()
    spoil(model)
    before = tree(model)
    with pytest.raises(HeadloomError, match=message):
        hl.fold(model) if how == "fold" else hl.graft(model, **IHA)
    assert tree(model) == before


def test_after_mixed_precision_is_unwrapped(llama, ids):
    """accelerate leaves the class's own forward on the model; the graft's is its class's."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    model, x = llama(dtype=torch.float32), ids(1, 6)
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    prepared = accelerator.prepare_model(model)
    AcceleratorState._reset_state(reset_partial_state=True)  # it is one for the whole process
    with pytest.raises(HeadloomError, match=r"the forward of the model was replaced .*unwrap_model"):
        hl.graft(prepared, **IHA)
    grafted = hl.graft(accelerator.unwrap_model(prepared, keep_fp32_wrapper=False), **IHA)
    assert "forward" in vars(model) and grafted.forward.__func__ is type(grafted).forward
    apart = call(grafted, x, position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]))[:, 3:]
    torch.testing.assert_close(apart, call(grafted, x[:, 3:]), rtol=0, atol=1e-4)


def test_what_was_compiled_calls_the_original(llama):
    from transformers import CompileConfig

    model, how = llama(), CompileConfig(backend="eager", mode=None)
    first = model.get_compiled_call(how)
    grafted = hl.graft(model, **IHA)
    assert model.get_compiled_call(how) is first is not grafted.get_compiled_call(how)


def test_attributes_of_the_users_own(llama):
    model = llama()
    model.notes, model.seen = {"by": ["me"]}, model(torch.tensor([[3, 4]])).logits  # a tensor with a history
    model.first = model.model.layers[0]
    model.model.layers[0].mlp.forward = model.model.layers[0].mlp.forward  # a method of its own, as kernels patch it
    grafted = hl.graft(model, **IHA)
    assert grafted.notes == model.notes and grafted.notes is not model.notes
    assert grafted.seen is model.seen and grafted.first is grafted.model.layers[0]
    assert grafted.model.layers[0].mlp.forward.__self__ is grafted.model.layers[0].mlp


def test_the_report_stays_with_the_model(llama, tmp_path):
    model = llama()
    grafted = hl.graft(model, **IHA)
    for twin in (copy.deepcopy(grafted), pickle.loads(pickle.dumps(grafted))):
        assert twin.graft_report == grafted.graft_report
    assert not hasattr(model, "graft_report")
    grafted.save_pretrained(tmp_path)
    assert "report" not in (tmp_path / "config.json").read_text()
    assert type(grafted).from_pretrained(tmp_path).graft_report is None


# ---- folding -----------------------------------------------------------------------------------------------------
def test_a_graft_stays_as_it_was_when_it_is_folded(llama, ids, tree):
    model, x = llama(), ids(2, 9)
    grafted = hl.graft(model, "iha", pseudo_heads=1, layers=1)
    with torch.no_grad():
        grafted.model.layers[1].self_attn.q_mix.weight.mul_(1.5)
    seen, before, original = tree(grafted), call(grafted, x), call(model, x)
    plain = hl.fold(grafted)
    assert tree(grafted) == seen and type(plain) is LlamaForCausalLM and not hasattr(plain, "graft_report")
    torch.testing.assert_close(call(plain, x), before, rtol=0, atol=1e-9)
    assert torch.equal(call(grafted, x), before) and torch.equal(call(model, x), original)
    assert (original - before).abs().max() > 1e-3, "the mix matters"
    assert plain.model.layers[0].mlp.up_proj.weight is model.model.layers[0].mlp.up_proj.weight
    assert plain.model.layers[1].self_attn.q_proj.weight is not model.model.layers[1].self_attn.q_proj.weight
