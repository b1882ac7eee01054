"""transformers' own tests of every model (`ModelTesterMixin`), on grafts of four families.

The file comes from the sdist of the installed transformers (tests/transformers_tests.py). Without it this is skipped;
where CI is set, it then fails. What is not run stands in SKIPPED, and nothing else may skip itself.
"""

import importlib
import os
import re
import sys
import unittest

import pytest
import torch
import transformers_tests
from published import default_config

from headloom.hf.model.classes import model_class, register_heads
from headloom.hf.model.config import grafted_config
from headloom.hf.model.family import families

FAMILIES = ("llama", "gpt2", "bert", "gemma2")
SKIPPED = [  # names, families (None: all four), why
    ("deepspeed|flash_attn|kernels|flex_attention", None, "needs a GPU, DeepSpeed or the kernels library"),
    ("offload|parallelism|compile_dynamic|dispatch_on_flash", None, "needs a GPU"),
    ("load_with_(device|global)", None, "needs a GPU; tests/hf/test_graft.py loads under torch.device here"),
    ("torch_compile_for_training", None, "transformers runs it on demand; tests/hf/test_compile.py here"),
    (
        "image|video|audio|vision|multimodal|composite_models?$|subconfig|text_features",
        None,
        "not models of text alone",
    ),
    ("encoder_decoder", None, "no encoder with a decoder can be grafted"),
    ("moe_|router_logits|batched_and_grouped", None, "no experts in these; tests/hf/test_mixtral.py here"),
    ("loading_mapping|already_mapped", None, "these rename no weights; tests/hf/test_mixtral.py here"),
    ("init_all_missing_weights", None, "for families of 2023 and later; test_battery.py loads base checkpoints here"),
    ("resize_position_vector", None, "none of these can resize its positions"),
    ("sliding_window_mask", None, "of `use_sliding_window`, which none of these has; test_published.py here"),
    ("partial_rotation", None, "none of these rotates a part of its heads; GPT-NeoX does in test_battery.py"),
    ("rope", ("gpt2", "bert"), "learned positions"),
    ("tp_plan", ("gpt2", "bert"), "the family has no plan for tensor parallelism"),
    ("causal_lm_loss|bc_cache_name", ("bert",), "an encoder"),
    ("bc_cache_name", ("gpt2",), "its test is of models that return another cache"),
    ("matches_sdpa|set_attention_dynamically$", ("gemma2",), "the family's class does not support SDPA"),
    ("output_attentions$", ("llama", "gpt2"), "a head of the family does not name output_attentions"),
    ("matches_sdpa.*(fp16|bf16)", None, "grafted layers do not ask the implementation; float32 shows the others"),
    ("bc_torch_dtype", None, "2,000 small tests of a deprecated name; tests/hf/test_types.py loads every type here"),
    ("generation_tester_mixin", None, "generation has tests of its own: tests/hf/test_generate.py"),
    (
        "sdpa_can_dispatch_non",
        None,
        "by design: unless told otherwise a graft's implementation is 'headloom', not sdpa",
    ),
    (
        "reload_no_missing_tied",
        None,
        "by design: a folder that lacks a graft's weights is refused, not filled at random",
    ),
]
IHA = {"mechanism": "iha", "options": {"pseudo_heads": 2, "order": "token", "phase": "token", "init": "carrier"}}
SAS = {"mechanism": "sas", "options": {"simulated_heads": 4, "kernel_size": 3, "init": "identity"}}
TALKING = {"mechanism": "talking_heads", "options": {}}
OF_WEIGHTS = "attention_outputs|states_attentions|outputs_equivalence|capture_outputs|output_attentions"
HEADS = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSequenceClassification")


def common():
    """transformers' module, which takes our classes for the family's where it goes by names."""
    if not transformers_tests.folder().is_dir():
        reason = "transformers' own tests are not here: `python tests/transformers_tests.py` fetches them"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason, allow_module_level=True)
    sys.path.insert(0, str(transformers_tests.folder()))
    try:
        found = importlib.import_module(f"{transformers_tests.PACKAGE}.test_modeling_common")
    finally:
        del sys.path[0]
    values, bases = found.get_values, found.MODEL_MAPPING_NAMES
    found.get_values = lambda mapping: [x for name in values(mapping) for x in (name, f"Headloom{name}")]
    found.MODEL_MAPPING_NAMES = {key: (bases[key], f"Headloom{bases[key]}") for key in FAMILIES}
    return found


class Asked:
    """What the mixin asks of a model's tester: a config and inputs, of a graft of two layers."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads, num_choices, num_labels = 3, 7, 2, 4, 3, 3
    is_training = True

    def __init__(self, family, specs):
        self.family, self.specs = family, specs
        self.hidden_size = self.get_config().hidden_size

    def get_config(self):
        config = default_config(self.family, vocab_size=99, num_hidden_layers=2, pad_token_id=0)
        return grafted_config(config, self.specs)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def left_out(test, family):
    return any(re.search(names, test) and (own is None or family in own) for names, own, _ in SKIPPED)


def made(family):
    """The mixin's tests of one family's grafts, as a class."""
    register_heads(families()[family])
    heads = families()[family].head_classes()
    wanted = [heads[name] for name in HEADS if name in heads and (family, name) != ("bert", "AutoModelForCausalLM")]

    def set_up(self):
        weights = re.search(OF_WEIGHTS, self._testMethodName)  # which iha has none of
        self.model_tester = Asked(family, [TALKING, SAS] if weights else [IHA, SAS])

    def skip_test(self, reason):
        self.fail(f"skips itself, and SKIPPED does not say why: {reason}")

    body = {"setUp": set_up, "skipTest": skip_test, "all_model_classes": tuple(model_class(family, h) for h in wanted)}
    tests = [name for name in dir(module.ModelTesterMixin) if name.startswith("test_")]
    body |= {name: None for name in tests if left_out(name, family)}
    return type(f"Test{family.capitalize()}", (module.ModelTesterMixin, unittest.TestCase), body)


module = common()
pytestmark = pytest.mark.filterwarnings("default")  # they are transformers' about itself
TestLlama, TestGpt2, TestBert, TestGemma2 = map(made, FAMILIES)


def test_the_table_names_tests_that_there_are():
    tests = [name for name in dir(module.ModelTesterMixin) if name.startswith("test_")]
    for names, own, _ in SKIPPED:
        assert any(re.search(names, test) for test in tests), names
        assert own is None or set(own) < set(FAMILIES)
    kept = [test for test in tests if not left_out(test, "llama")]
    assert len(kept) > 60 and not any(
        getattr(getattr(module.ModelTesterMixin, x), "__unittest_skip__", 0) for x in kept
    )
