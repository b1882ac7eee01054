"""A tiny run on a fixed text, with a stock Llama where the attention is not the point."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from headloom.data.corpus import Corpus
from headloom.data.packing import TokenData, prepare
from headloom.data.sources import Document
from headloom.data.tokenizer import make_tokenizer
from headloom.records.runs import RunResult
from headloom.train.config import RunConfig
from headloom.train.run import train

TEXT = "".join(f"line {i}: the {['cat', 'dog', 'owl'][i % 3]} has {i * i % 97} of {i % 7} things\n" for i in range(150))


def stock_llama(run: RunConfig, tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    torch.manual_seed(run.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=run.hidden_size,
            intermediate_size=run.intermediate_size,
            num_hidden_layers=run.num_layers,
            num_attention_heads=run.num_heads,
            attention_bias=True,
            attention_dropout=0.1,
        )
    )


def config(**changes: Any) -> RunConfig:
    fields = {
        "name": "tiny",
        "specs": ["mha"],
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 2,
        "intermediate_size": 24,
        "tokens": 16,
        "batch_size": 4,
        "steps": 6,
        "warmup_steps": 2,
        "learning_rate": 3e-3,
        "threads": 1,
        "device": "cpu",
        "evaluations": 0,
    }
    return RunConfig(**(fields | changes))


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer("bytes")


@pytest.fixture(scope="session")
def data(tokenizer: PreTrainedTokenizerFast) -> TokenData:
    corpus = Corpus((Document("t", TEXT),), (Document("v", TEXT[-400:]),), fingerprint="f", title="lines")
    return prepare(corpus, tokenizer, context=16)


@pytest.fixture
def run_tiny(
    data: TokenData, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> Callable[..., tuple[RunResult, Path]]:
    """Train with `config(**changes)` in a new folder; returns result and folder."""
    made = iter(range(100))

    def run(*, make_model: Any = stock_llama, on_progress: Any = None, save_model: bool = False, **changes: Any):
        folder = tmp_path / f"run{next(made)}"
        result = train(
            config(**changes), data, tokenizer, folder, on_progress, save_model=save_model, make_model=make_model
        )
        return result, folder

    return run


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """`config(**changes)`."""
    return config
