"""Bits per byte: what a model pays, in bits, for each byte of a text it has not seen.

    nll_per_token = (1/N) sum_i -ln p(x_i | at most C-1 tokens before it)      over all N tokens, not over batches
    perplexity    = exp(nll_per_token)                                         depends on the tokenizer
    bits_per_byte = (N / bytes) nll_per_token / ln 2                           does not

Every token is predicted exactly once: rows of C tokens overlap by one (stride C-1) and the last, shorter row counts
too. The stream's first token, end-of-text, is the begin token and is not predicted; the later end-of-text tokens
are, and stand for no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from headloom.core.errors import HeadloomError
from headloom.data.packing import TokenStream

LN2 = math.log(2.0)


@dataclass(frozen=True)
class BitsPerByte:
    """A measurement and the rules it was taken by.

    Attributes:
        bits_per_byte: bits paid per UTF-8 byte of text.
        nll_per_token: mean negative log-likelihood in nats, token-weighted.
        perplexity: exp(nll_per_token); infinite when that overflows.
        tokens: predicted tokens. bytes: of the text. context, stride: in tokens.
        lost: the share of the bytes that do not come back from the tokens, at least; None where it was not measured.
        text: the rules in one line, to be printed beside the number.
    """

    bits_per_byte: float
    nll_per_token: float
    perplexity: float
    tokens: int
    bytes: int
    context: int
    stride: int
    lost: float | None = None
    text: str = field(init=False)

    def __post_init__(self) -> None:
        text = (
            f"bits per byte over {self.tokens:,} tokens ({self.bytes:,} bytes), token-weighted; "
            f"context {self.context}, stride {self.stride} (rows share one token, each token predicted once, "
            f"with 1 to {self.stride} tokens before it); begin token: end-of-text, not predicted; "
            "text-separating end-of-text tokens predicted, 0 bytes"
        )
        if self.lost:
            text += f"; the tokenizer loses at least {self.lost:.2%} of these bytes, which no token pays for"
        object.__setattr__(self, "text", text)

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able dictionary of every field."""
        return asdict(self)


@dataclass
class Total:
    """Token-weighted mean of negative log-likelihoods: sums are added up, never means."""

    nll: float = 0.0
    tokens: int = 0

    def add(self, nll: torch.Tensor) -> None:
        """Add one value per token, of any shape, in nats."""
        self.nll += float(nll.double().sum())
        self.tokens += nll.numel()

    @property
    def mean(self) -> float:
        """Nats per token. Raises HeadloomError before any token was added."""
        if self.tokens == 0:
            raise HeadloomError(
                "no token was predicted: a text needs at least two tokens, the first of which is only seen."
            )
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(mean), infinite where that overflows."""
        return math.exp(self.mean) if self.mean < 709.0 else math.inf


def bits_per_byte(
    model: nn.Module, stream: TokenStream, *, context: int, batch_size: int = 16, dtype: torch.dtype | None = None
) -> BitsPerByte:
    """Measure a causal language model on a stream of tokens.

    Args:
        model: called as model(input_ids=..., use_cache=False), gives `.logits` of shape (B, T, vocabulary); put in
            eval mode and back.
        stream: packed by headloom.data.pack.
        context: tokens a row, at least 2.
        batch_size: rows a forward pass; decides memory and speed, not the result.
        dtype: a half-precision type to run in by autocast (None: the model's own). Log-probabilities are float32,
            their sum float64.

    Raises:
        HeadloomError: nothing to predict, or a text without bytes.
    """
    if batch_size < 1:
        raise HeadloomError(f"batch_size={batch_size} evaluates nothing. Give at least 1.")
    device = next(model.parameters()).device
    total = Total()
    with _evaluating(model), torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
        for ids_BT in _batches(stream, context, batch_size):
            ids_BT = ids_BT.to(device)
            logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1].float()
            total.add(F.cross_entropy(logits_BTV.flatten(0, 1), ids_BT[:, 1:].flatten(), reduction="none"))
    if stream.bytes == 0:
        raise HeadloomError("the text to evaluate holds no bytes. Give a text that is not empty.")
    return BitsPerByte(
        bits_per_byte=total.mean * total.tokens / stream.bytes / LN2,
        nll_per_token=total.mean,
        perplexity=total.perplexity,
        tokens=total.tokens,
        bytes=stream.bytes,
        context=context,
        stride=context - 1,
        lost=stream.lost,
    )


def _batches(stream: TokenStream, context: int, batch_size: int) -> Iterator[torch.Tensor]:
    """Full rows in batches, then the shorter rest alone: nothing is padded, so padding cannot change a result."""
    rows = stream.rows(context)
    for start in range(0, rows, batch_size):
        yield torch.stack([stream.row(index, context) for index in range(start, min(start + batch_size, rows))])
    rest = stream.row(rows, context)
    if len(rest) > 1:
        yield rest[None]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not inference_mode: tables cached here serve training later
            yield
    finally:
        model.train(training)
