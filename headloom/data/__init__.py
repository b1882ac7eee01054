"""Text, tokens and their order: corpora, tokenizers, packing. Everything here is a function of its arguments alone."""

from headloom.data.corpus import DEFAULT_LIMIT_BYTES, Corpus, load_corpus
from headloom.data.packing import TokenData, TokenStream, TrainingRows, pack, prepare, row_order
from headloom.data.sources import Document
from headloom.data.tokenizer import make_tokenizer, token_bytes

__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "Corpus",
    "Document",
    "TokenData",
    "TokenStream",
    "TrainingRows",
    "load_corpus",
    "make_tokenizer",
    "pack",
    "prepare",
    "row_order",
    "token_bytes",
]
