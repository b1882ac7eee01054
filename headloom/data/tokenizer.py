"""Tokenizers: bytes, a byte-level BPE that is trained on the run's text, or a saved one.

All are Hugging Face fast tokenizers and are saved with the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from headloom.core.errors import HeadloomError, near

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT, PADDING = "<|endoftext|>", "<|pad|>"
_SPECIALS = 2
_SMALLEST = 256 + _SPECIALS
_ALLOWED = (
    f"'bytes', 'bpe:N' with N >= {_SMALLEST} (say bpe:4096), a folder with a saved tokenizer, or 'owner/name' of one "
    "on the Hugging Face hub"
)
_HUB = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def make_tokenizer(spec: str | Path = "bytes", train_texts: Iterable[str] = ()) -> PreTrainedTokenizerFast:
    """A tokenizer with end-of-text (also the begin token) and padding.

    Args:
        spec: "bytes" - the id of a byte is its value, 256 ends a text, 257 pads; "bpe:N" - a byte-level BPE of N
            tokens in all, trained on `train_texts` (the same texts give the same tokenizer); a folder with a saved
            fast tokenizer; or "owner/name" of one on the hub. No code from it is run.
        train_texts: the TRAINING texts; used by bpe only.

    In the first two a special token's spelling inside a text stays text, so every Unicode string comes back from its
    ids unchanged.

    Raises:
        HeadloomError: unknown spec, a vocabulary too small or larger than the text yields, a folder without a usable
            tokenizer.
    """
    check_tokenizer(spec)
    from tokenizers import models
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    text = str(spec)
    if text == "bytes":
        return _wrap(
            _byte_level(
                models.BPE(vocab={char: byte for byte, char in bytes_to_unicode().items()}, merges=[]), use_regex=False
            )
        )
    if text.startswith("bpe"):
        return _train_bpe(text, train_texts)
    path = Path(text).expanduser()
    return _saved(path if path.is_dir() else text)


def check_tokenizer(spec: str | Path) -> None:
    """Raise HeadloomError for errors that the name alone shows, without reading anything and without torch."""
    text = str(spec)
    if text.startswith("bpe"):
        match = re.fullmatch(r"bpe:(\d+)", text)
        if match is None or int(match[1]) < _SMALLEST:
            raise HeadloomError(
                f"tokenizer '{text}' names no vocabulary: 256 bytes and {_SPECIALS} special tokens are the least. "
                f"Allowed: {_ALLOWED}."
            )
    elif text != "bytes" and not Path(text).expanduser().is_dir() and not _HUB.fullmatch(text):
        raise HeadloomError(f"unknown tokenizer '{text}'.{near(text, ['bytes', 'bpe:4096'])} Allowed: {_ALLOWED}.")


def is_bytes(tokenizer: PreTrainedTokenizerFast) -> bool:
    """Whether ids 0..255 are exactly the bytes and nothing merges, so that ids are read off the encoded text."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    if len(tokenizer) != _SMALLEST or tokenizer.eos_token_id != 256:
        return False
    characters = bytes_to_unicode()
    return tokenizer.convert_tokens_to_ids([characters[byte] for byte in range(256)]) == list(range(256))


def token_bytes(tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """How many bytes of text each id stands for, shape (vocabulary,), int64; special tokens stand for 0.

    For byte-level vocabularies (ours, GPT-2's, Llama 3's). Raises HeadloomError for one whose tokens are not spelt
    in bytes.
    """
    import torch
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    alphabet = set(bytes_to_unicode().values())
    specials = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    lengths = torch.zeros(len(tokenizer), dtype=torch.int64)
    for token, index in tokenizer.get_vocab().items():
        if index in specials:
            continue
        if not alphabet.issuperset(token):
            raise HeadloomError(
                f"token {token!r} is not spelt in bytes: this is no byte-level tokenizer. "
                "Use 'bytes', 'bpe:N', or one of GPT-2's kind."
            )
        lengths[index] = len(token)
    return lengths


def _byte_level(model: models.Model, *, use_regex: bool) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, pre_tokenizers

    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )


def _train_bpe(spec: str, texts: Iterable[str]) -> PreTrainedTokenizerFast:
    from tokenizers import models, pre_tokenizers, trainers

    size = int(spec.removeprefix("bpe:"))
    tokenizer = _byte_level(models.BPE(), use_regex=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size - _SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = _wrap(tokenizer)
    if len(wrapped) != size:
        raise HeadloomError(
            f"tokenizer '{spec}': this text yields only {len(wrapped)} tokens. "
            f"Ask for at most bpe:{len(wrapped)}, or give more text."
        )
    return wrapped


def _saved(path: Path | str) -> PreTrainedTokenizerFast:
    """From a folder, or by the hub's name."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    here = isinstance(path, Path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=here, trust_remote_code=False)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        if not here:
            raise HeadloomError(
                f"'{path}' is no folder here, and as a tokenizer of the Hugging Face hub it does not load ({reason}) "
                f"Allowed: {_ALLOWED}."
            ) from error
        raise HeadloomError(
            f"'{path}' holds no tokenizer that loads without its own code ({reason}) Allowed: {_ALLOWED}."
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise HeadloomError(
            f"the tokenizer '{path}' is a {type(tokenizer).__name__}, not a fast one (tokenizer.json). "
            f"Allowed: {_ALLOWED}."
        )
    if tokenizer.eos_token_id is None:
        raise HeadloomError(
            f"the tokenizer '{path}' has no end-of-text token to separate documents with. "
            "Set its eos_token and save it again."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer
