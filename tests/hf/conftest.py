"""Tiny models whose attention matters: large weights, every mix and convolution away from its initial value."""

import re
from pathlib import Path

import pytest
import torch

from headloom.hf import build_model

MARKS = ("accelerate_tests", "flash_attn_test", "flash_attn_3_test", "flash_attn_4_test", "slow", "torch_compile_test")


def pytest_configure(config):
    for mark in MARKS:
        config.addinivalue_line("markers", f"{mark}: of transformers' own tests (test_modeling_common.py)")


SIZES = {
    "vocab_size": 37,
    "hidden_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "head_dim": 10,
    "intermediate_size": 29,
    "max_positions": 64,
    "rope_theta": 100.0,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

VARIANTS = {
    "mha": ("mha", {}),
    "gqa": ("gqa", {"num_kv_heads": 2}),
    "iha": ("iha", {"num_kv_heads": 2, "pseudo_heads": 3}),
    "iha-token": ("iha", {"num_kv_heads": 2, "pseudo_heads": 2, "order": "token", "phase": "token"}),
    "sas": ("sas", {"num_kv_heads": 2, "simulated_heads": 8, "kernel_size": 3}),
    "sas-base": ("sas", {"num_kv_heads": 2, "simulated_heads": 8, "kernel_size": 3, "cache": "base"}),
}


def stir(model, seed=0):
    """Random values everywhere, large enough that what a token sees changes its logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            if parameter.ndim < 2:
                parameter.copy_(1 + 0.1 * noise if "norm" in name else 0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * parameter[0].numel() ** -0.5 * (2.0 if "_proj" in name else 1.0))
    return model


@pytest.fixture
def tiny():
    """tiny("iha", dtype=..., **sizes and options): an evaluation-mode model of that variant."""

    def make(variant, *, dtype=torch.float64, stirred=True, options=None, **sizes):
        name, own = VARIANTS[variant]
        model = build_model((name, {**own, **(options or {})}), **{**SIZES, **sizes}).to(dtype)
        return (stir(model) if stirred else model).eval()

    return make


@pytest.fixture
def mixed():
    """mixed([spec, spec]): a model with these layers, which may differ."""

    def make(specs):
        return stir(build_model(specs, **{**SIZES, "num_layers": len(specs)}).double()).eval()

    return make


@pytest.fixture
def llama():
    """llama(kv_heads=2, ...): a plain LlamaForCausalLM from transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    def make(*, dtype=torch.float64, kv_heads=2, **changes):
        fields = {
            "vocab_size": 37,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": kv_heads,
            "head_dim": 10,
            "intermediate_size": 29,
            "max_position_embeddings": 64,
            "tie_word_embeddings": True,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            **changes,
        }
        return stir(LlamaForCausalLM(LlamaConfig(**fields)).to(dtype)).eval()

    return make


def in_float64(model):
    """A mixture of experts; transformers' fast product of its experts takes no float64."""
    model.set_experts_implementation("eager")
    return stir(model.double()).eval()


@pytest.fixture
def mixtral():
    """mixtral(sliding_window=4, ...): a plain MixtralForCausalLM of five experts from transformers."""
    from transformers import MixtralConfig, MixtralForCausalLM

    def make(**changes):
        fields = {
            "vocab_size": 37,
            "hidden_size": 24,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 10,
            "intermediate_size": 29,
            "num_local_experts": 5,
            "max_position_embeddings": 64,
            "pad_token_id": 0,
            **changes,
        }
        return in_float64(MixtralForCausalLM(MixtralConfig(**fields)))

    return make


@pytest.fixture
def routed():
    """routed(specs, **sizes): our own Mixtral of five experts, two a token, with random values everywhere."""

    def make(specs, **changes):
        own = {"family": "mixtral", "experts": 5, "experts_per_token": 2}
        return in_float64(build_model(specs, **{**SIZES, **own, **changes}))

    return make


@pytest.fixture
def tree():
    """tree(model): every module with all of its attributes, by identity, and what can change inside of them: the values
    of tensors, the entries of dicts and sets, the texts of configs."""

    def inside(value):
        if isinstance(value, torch.Tensor):
            return value.data_ptr(), value._version, value.requires_grad, id(value.grad)
        if isinstance(value, dict):
            return [(key, id(held), inside(held)) for key, held in value.items()]
        if isinstance(value, (set, list, tuple)):
            return sorted(map(repr, value))
        return repr(value) if "Config" in type(value).__name__ else None

    def look(model):
        return [
            (path, id(module), type(module), [(name, id(value), inside(value)) for name, value in vars(module).items()])
            for path, module in model.named_modules()
        ]

    return look


@pytest.fixture
def ids():
    """ids(B, T): token ids without special tokens, the same for equal sizes."""

    def make(B, T, seed=0):
        return torch.randint(3, 37, (B, T), generator=torch.Generator().manual_seed(seed))

    return make


@pytest.fixture
def listed():
    """listed(heading): of the table of docs/grafting.md that starts with this heading, what each name of its first
    column (commas between them, explanations in brackets) has in the other columns."""

    def read(heading):
        page = (Path(__file__).parents[2] / "docs" / "grafting.md").read_text(encoding="utf-8")
        rows = page.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
        found = {}
        for names, *others in ([cell.strip() for cell in row.strip("|").split("|")] for row in rows):
            for name in re.sub(r" \(.*?\)", "", names).split(", "):
                assert name not in found, f"{name} stands twice"
                found[name] = others
        return found

    return read


class Counting:
    """A compiler's backend (aot_eager) that counts its graphs, and how many there were when each token was chosen."""

    def __init__(self):
        self.graphs, self.at_token = 0, []

    def __call__(self, module, inputs):
        from torch._dynamo.backends.debugging import aot_eager

        self.graphs += 1
        return aot_eager(module, inputs)

    def __deepcopy__(self, memo):  # CompileConfig copies what it is given
        return self

    def processor(self):
        from transformers import LogitsProcessor

        counting = self

        class Watch(LogitsProcessor):
            def __call__(self, ids, scores):
                counting.at_token.append(counting.graphs)
                return scores

        return Watch()

    def decode(self, model, x, mask, steps):
        """Tokens by transformers' own compiled decoding with a static cache."""
        from transformers import CompileConfig

        how = CompileConfig(backend=self, fullgraph=True, mode=None)
        how._compile_all_devices = True  # transformers does so by itself on an accelerator
        return model.generate(
            x, attention_mask=mask, max_new_tokens=steps, cache_implementation="static", compile_config=how,
            logits_processor=[self.processor()], do_sample=False, eos_token_id=None,
        )  # fmt: skip


@pytest.fixture
def counting():
    torch._dynamo.reset()
    yield Counting()
    torch._dynamo.reset()


def pytest_generate_tests(metafunc):
    if "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", list(VARIANTS))
