"""Tiny checkpoints on disk, and the command line in this process."""

import pytest
import torch
from typer.testing import CliRunner

from headloom.cli.app import app


@pytest.fixture
def call():
    """call("graft", ...): the finished command, with exit_code, stdout and stderr."""
    return lambda *arguments: CliRunner().invoke(app, [str(argument) for argument in arguments])


def tiny_llama(**changes):
    """A plain LlamaForCausalLM over bytes whose attention matters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    fields = {
        "vocab_size": 258,
        "hidden_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 6,
        "intermediate_size": 29,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "pad_token_id": 257,
        "bos_token_id": 256,
        "eos_token_id": 256,
        **changes,
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**fields)).eval()


@pytest.fixture(scope="session")
def plain_llama():
    """plain_llama(vocab_size=200, ...): that model with other fields."""
    return tiny_llama


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A folder with that model and a byte tokenizer."""
    from headloom.data.tokenizer import make_tokenizer

    folder = tmp_path_factory.mktemp("checkpoints") / "llama"
    tiny_llama().save_pretrained(folder)
    make_tokenizer("bytes").save_pretrained(folder)
    return folder
