"""Bits per byte against values worked by hand."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from headloom.core.errors import HeadloomError
from headloom.data.packing import TokenStream, pack_documents
from headloom.data.sources import Document
from headloom.data.tokenizer import make_tokenizer
from headloom.evaluate import Total, bits_per_byte


class Uniform(nn.Module):
    """Equal probability for each of `vocabulary` tokens."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.unused = nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        assert not self.training and not torch.is_grad_enabled() and not use_cache
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, self.vocabulary))


class Preset(Uniform):
    """On the stream 0, 1, 2, ...: p(i+1 | i) = exp(-loss[i]), all other tokens share the rest."""

    def __init__(self, losses: list[float]) -> None:
        super().__init__(len(losses) + 1)
        self.losses = losses

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        size = self.vocabulary
        table = torch.zeros(size, size, dtype=torch.float64)
        for index, loss in enumerate(self.losses):
            table[index] = (1 - math.exp(-loss)) / (size - 1)
            table[index, index + 1] = math.exp(-loss)
        table[size - 1] = 1 / size
        return SimpleNamespace(logits=table.log()[input_ids])


def count(tokens: int) -> TokenStream:
    return TokenStream(np.arange(tokens, dtype=np.uint16), bytes=2 * tokens, documents=1)


def test_a_uniform_model_pays_log2_of_the_vocabulary_a_token():
    stream = pack_documents([Document("a", "héllo"), Document("b", "x" * 40)], make_tokenizer("bytes"))
    measured = bits_per_byte(Uniform(258), stream, context=7)
    # 6 + 40 bytes are 46 byte tokens and 2 end tokens after the begin token
    assert (measured.tokens, measured.bytes) == (48, 46)
    assert measured.bits_per_byte == pytest.approx(math.log2(258) * 48 / 46, rel=1e-6)
    assert measured.nll_per_token == pytest.approx(math.log(258), rel=1e-6)
    assert measured.perplexity == pytest.approx(258, rel=1e-5)


def test_perplexity_is_token_weighted():
    total = Total()
    for losses in ([0.1, 0.2, 0.1], [0.3, 0.5, 0.1, 0.4, 0.2]):
        total.add(torch.tensor(losses, dtype=torch.float64))
    assert total.tokens == 8
    assert round(total.perplexity, 6) == 1.268075


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_uneven_rows_are_weighted_by_their_tokens(batch_size):
    losses = [0.3, 0.5, 0.1, 0.4, 0.2, 0.1, 0.2, 0.1]  # context 6: a row of five predictions and the rest of three
    measured = bits_per_byte(Preset(losses), count(9), context=6, batch_size=batch_size)
    assert measured.tokens == 8
    assert measured.perplexity == pytest.approx(1.268075, abs=1e-6)
    assert measured.bits_per_byte == pytest.approx(sum(losses) / math.log(2) / 18, rel=1e-6)


def small_llama(vocabulary: int = 258) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes))


def test_batch_size_does_not_change_the_result_and_the_mode_is_kept():
    model = small_llama().train()
    stream = pack_documents([Document("a", "some text to measure, 83 bytes. " * 9)], make_tokenizer("bytes"))
    values = [bits_per_byte(model, stream, context=17, batch_size=size).bits_per_byte for size in (1, 3, 64)]
    assert max(values) - min(values) < 1e-5 * values[0]
    assert model.training
    assert bits_per_byte(model.eval(), stream, context=17).bits_per_byte == pytest.approx(values[0], rel=1e-5)
    assert not model.training


def test_a_real_model_agrees_with_one_token_at_a_time():
    model, context = small_llama().double().eval(), 5
    # 12 tokens: rows of 5, 5, and 4 (stride 4)
    stream = pack_documents([Document("a", "abcdefghij")], make_tokenizer("bytes"))
    ids = torch.from_numpy(stream.ids.astype(np.int64))
    paid = 0.0
    for target in range(1, len(ids)):
        start = (target - 1) // (context - 1) * (context - 1)
        with torch.no_grad():
            logits = model(input_ids=ids[None, start:target]).logits[0, -1]
        paid -= float(logits.log_softmax(-1)[ids[target]])
    measured = bits_per_byte(model, stream, context=context, batch_size=2)
    assert measured.tokens == 11
    assert measured.nll_per_token == pytest.approx(paid / 11, rel=1e-6)


def test_half_precision_is_near_and_only_on_request():
    model = small_llama()
    stream = pack_documents([Document("a", "some text to measure. " * 9)], make_tokenizer("bytes"))
    exact = bits_per_byte(model, stream, context=17).nll_per_token
    half = bits_per_byte(model, stream, context=17, dtype=torch.bfloat16).nll_per_token
    assert half != exact and half == pytest.approx(exact, rel=1e-2)


def test_the_rules_stand_in_one_line():
    measured = bits_per_byte(Uniform(20), count(9), context=6)
    assert "\n" not in measured.text
    for words in ("context 6", "stride 5", "begin token", "8 tokens", "18 bytes", "token-weighted"):
        assert words in measured.text
    assert measured.to_dict()["stride"] == 5 and measured.to_dict()["text"] == measured.text


def test_overflowing_perplexity_is_infinite():
    total = Total()
    total.add(torch.tensor([1000.0]))
    assert total.perplexity == math.inf


@pytest.mark.parametrize(
    ("stream", "options", "words"),
    [
        (count(1), {"context": 4}, "no token was predicted"),
        (count(9), {"context": 1}, "context=1"),
        (count(9), {"context": 4, "batch_size": 0}, "batch_size=0"),
        (TokenStream(np.arange(4, dtype=np.uint16), bytes=0, documents=1), {"context": 4}, "holds no bytes"),
    ],
)
def test_nothing_to_measure_is_said(stream, options, words):
    with pytest.raises(HeadloomError, match=words):
        bits_per_byte(Uniform(20), stream, **options)
