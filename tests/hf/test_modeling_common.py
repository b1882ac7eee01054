"""transformers' own tests of every model (`ModelTesterMixin`), on grafts of four families.

The file comes from the sdist of the installed transformers (tests/transformers_tests.py). Where CI is set its absence is
a failure; elsewhere it is skipped.
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

from headloom.hf.classes import model_class
from headloom.hf.config import grafted_config
from headloom.hf.family import families

SKIPPED = {}
FAMILIES = ("llama", "gpt2", "bert", "gemma2")
IHA = {"mechanism": "iha", "options": {"pseudo_heads": 2, "order": "token", "phase": "token", "init": "carrier"}}
SAS = {"mechanism": "sas", "options": {"simulated_heads": 4, "kernel_size": 3, "init": "identity"}}
TALKING = {"mechanism": "talking_heads", "options": {}}
HEADS = ("AutoModel", "AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForSequenceClassification")


def common():
    """transformers' module, which takes our classes for the family's where it goes by names."""
    if not transformers_tests.folder().is_dir():
        reason = "transformers' own tests are not here: `python tests/transformers_tests.py` fetches them"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason, allow_module_level=True)
    sys.path.insert(0, str(transformers_tests.folder()))
    try:
        module = importlib.import_module(f"{transformers_tests.PACKAGE}.test_modeling_common")
    finally:
        del sys.path[0]
    named = module.get_values
    module.get_values = lambda mapping: [x for name in named(mapping) for x in (name, f"Headloom{name}")]
    return module


module = common()


class Asked:
    """What the mixin asks of a model's tester."""

    batch_size, seq_length, num_hidden_layers, num_attention_heads, num_choices, num_labels = 3, 7, 2, 4, 3, 3
    is_training = True

    def __init__(self, family):
        self.family, self.specs = families()[family], [IHA, SAS]
        self.encoder = family == "bert"

    def get_config(self):
        config = default_config(
            self.family.name,
            vocab_size=99,
            num_hidden_layers=2,
            max_position_embeddings=64,
            pad_token_id=0,
        )
        self.hidden_size = config.hidden_size
        return grafted_config(config, self.specs)

    def prepare_config_and_inputs_for_common(self):
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def made(family):
    heads = families()[family].head_classes()
    wanted = [heads[name] for name in HEADS if name in heads and (name != "AutoModelForCausalLM" or family != "bert")]

    def set_up(self):
        self.model_tester = Asked(family)
        if re.search("attention_outputs|attentions|outputs_equivalence", self._testMethodName):
            self.model_tester.specs = [TALKING, SAS]

    body = {"setUp": set_up, "all_model_classes": tuple(model_class(family, head) for head in wanted)}
    body |= {name: None for name in SKIPPED}
    name = f"Test{family.capitalize()}"
    return type(name, (module.ModelTesterMixin, unittest.TestCase), {**body, "__module__": __name__})


pytestmark = pytest.mark.filterwarnings("default")
TestLlama, TestGpt2, TestBert, TestGemma2 = map(made, FAMILIES)
