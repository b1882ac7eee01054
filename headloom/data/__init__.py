"""Text, tokens and their order: corpora, tokenizers, packing. Everything here is a function of its arguments alone.

Names are loaded when first used: what is wrong with the name of a text or a tokenizer is said without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headloom.data.corpus import DEFAULT_LIMIT_BYTES, Corpus, check_corpus, load_corpus
    from headloom.data.packing import TokenData, TokenStream, TrainingRows, pack, prepare, row_order
    from headloom.data.sources import Document
    from headloom.data.tokenizer import check_tokenizer, make_tokenizer, token_bytes

_PLACES = {
    **dict.fromkeys(("DEFAULT_LIMIT_BYTES", "Corpus", "check_corpus", "load_corpus"), "corpus"),
    **dict.fromkeys(("TokenData", "TokenStream", "TrainingRows", "pack", "prepare", "row_order"), "packing"),
    "Document": "sources",
    **dict.fromkeys(("check_tokenizer", "make_tokenizer", "token_bytes"), "tokenizer"),
}


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(importlib.import_module(f"headloom.data.{_PLACES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "DEFAULT_LIMIT_BYTES",
    "Corpus",
    "Document",
    "TokenData",
    "TokenStream",
    "TrainingRows",
    "check_corpus",
    "check_tokenizer",
    "load_corpus",
    "make_tokenizer",
    "pack",
    "prepare",
    "row_order",
    "token_bytes",
]
