"""Packing: each token predicted once; an order that is a function of (seed, epoch) and of nothing else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headloom.core.errors import HeadloomError
from headloom.data import packing as packing_module
from headloom.data.corpus import Corpus
from headloom.data.packing import TokenStream, TrainingRows, pack_documents, prepare, row_order
from headloom.data.sources import Document
from headloom.data.tokenizer import make_tokenizer

END = 256


def stream_of(count: int) -> TokenStream:
    return TokenStream(np.arange(count, dtype=np.uint16), bytes=count, documents=1)


def corpus_of(train: list[str], validation: list[str]) -> Corpus:
    split = [
        tuple(Document(f"{kind}{i}", text) for i, text in enumerate(texts))
        for kind, texts in (("t", train), ("v", validation))
    ]
    return Corpus(*split, fingerprint="f", title="a corpus")


def test_documents_stand_between_end_tokens_and_bytes_are_the_texts():
    stream = pack_documents([Document("a", "ab"), Document("b", "é")], make_tokenizer("bytes"))
    assert stream.ids.tolist() == [END, 97, 98, END, 0xC3, 0xA9, END]
    assert (stream.bytes, stream.documents, stream.predictions) == (4, 2, 6)


def test_the_fast_way_for_bytes_equals_the_tokenizer(monkeypatch):
    documents = [Document(str(i), text) for i, text in enumerate(["x <|endoftext|> y", "é\r\n\t 你", "z" * 50])]
    fast = pack_documents(documents, make_tokenizer("bytes"))
    monkeypatch.setattr(packing_module, "is_bytes", lambda tokenizer: False)
    monkeypatch.setattr(packing_module, "_BATCH_CHARACTERS", 20)
    slow = pack_documents(documents, make_tokenizer("bytes"))
    assert fast.ids.tolist() == slow.ids.tolist() and fast.bytes == slow.bytes
    assert fast.ids.tolist().count(END) == 4  # the spelling inside a text is no end token


def test_bpe_streams_spell_the_text():
    texts = ["the cat sat on the mat. " * 9, "one more <|endoftext|> cat. " * 9]
    tokenizer = make_tokenizer("bpe:280", texts)
    stream = pack_documents([Document(str(i), text) for i, text in enumerate(texts)], tokenizer)
    ends = [i for i, token in enumerate(stream.ids) if token == tokenizer.eos_token_id]
    assert len(ends) == 3 and ends[0] == 0 and ends[-1] == len(stream.ids) - 1
    assert tokenizer.decode(stream.ids[ends[0] + 1 : ends[1]].tolist()) == texts[0]
    assert tokenizer.decode(stream.ids[ends[1] + 1 : ends[2]].tolist()) == texts[1]


@pytest.mark.parametrize("count", [2, 5, 11, 12, 13, 16, 29])
@pytest.mark.parametrize("context", [2, 3, 5, 11])
def test_every_token_but_the_first_is_predicted_exactly_once(count, context):
    stream = stream_of(count)
    rows = [stream.row(index, context) for index in range(stream.rows(context) + 1)]
    assert all(len(row) == context for row in rows[:-1]) and len(rows[-1]) < context
    predicted = Counter(token for row in rows for token in row[1:].tolist())
    assert predicted == Counter(range(1, count))
    assert rows[0].dtype == torch.int64


def test_ids_above_the_small_type_survive():
    stream = TokenStream(np.array([0, 70000, 3], np.uint32), bytes=3, documents=1)
    assert stream.row(0, 3).tolist() == [0, 70000, 3]


def test_order_is_a_permutation_an_epoch_and_fixed_by_seed():
    rows = 7
    order = row_order(rows, seed=3, start=0, stop=21)
    assert order.tolist() == row_order(rows, seed=3, start=0, stop=21).tolist()
    epochs = order.reshape(3, rows)
    assert all(sorted(epoch) == list(range(rows)) for epoch in epochs.tolist())
    assert epochs[0].tolist() != epochs[1].tolist() != epochs[2].tolist()
    assert order.tolist() != row_order(rows, seed=4, start=0, stop=21).tolist()
    assert order.tolist() != list(range(rows)) * 3


@pytest.mark.parametrize("cuts", [(0, 5, 21), (0, 7, 14, 21), (0, 1, 20, 21)])
def test_order_resumes_anywhere(cuts):
    whole = row_order(7, seed=3, start=0, stop=21)
    parts = [row_order(7, 3, start, stop) for start, stop in pairwise(cuts)]
    assert np.concatenate(parts).tolist() == whole.tolist()
    assert row_order(7, 3, 5, 5).tolist() == []


def test_order_does_not_hear_the_global_random_state():
    packing_module._permutation.cache_clear()
    torch.manual_seed(1)
    np.random.seed(1)
    first = row_order(50, 0, 0, 50).tolist()
    packing_module._permutation.cache_clear()
    torch.manual_seed(2)
    np.random.seed(2)
    assert row_order(50, 0, 0, 50).tolist() == first


def test_training_rows_follow_the_order():
    stream = stream_of(29)
    rows = TrainingRows(stream, context=5, seed=1, count=12)
    assert len(rows) == 12
    for position, row in enumerate(row_order(7, 1, 0, 12)):
        item = rows[position]
        assert item["input_ids"].tolist() == list(range(4 * row, 4 * row + 5)) == item["labels"].tolist()


def test_prepare_samples_whole_validation_documents_and_cuts_the_last():
    corpus = corpus_of(["train text " * 30], [f"{i}é" * 20 for i in range(10)])
    tokenizer = make_tokenizer("bytes")
    whole = prepare(corpus, tokenizer, context=16, validation_bytes=None)
    part = prepare(corpus, tokenizer, context=16, validation_bytes=100)
    assert (whole.validation.bytes, whole.validation.documents) == (600, 10)
    assert part.validation.bytes in (99, 100) and part.validation.documents == 2
    assert part.train.ids.tolist() == whole.train.ids.tolist()
    assert part.fingerprint != whole.fingerprint
    assert part.fingerprint == prepare(corpus, tokenizer, context=16, validation_bytes=100).fingerprint
    assert part.vocab_size == 258 and part.title == "a corpus"
    assert part.leading is part.validation and whole.leading is whole.validation  # there is no more of it


def test_evaluations_along_the_way_read_the_same_part_of_the_text_whatever_the_whole():
    corpus = corpus_of(["train text " * 30], [f"{i}é" * 20 for i in range(10)])
    tokenizer = make_tokenizer("bytes")
    whole = prepare(corpus, tokenizer, context=16, leading_bytes=100)
    assert (whole.validation.bytes, whole.leading.bytes in (99, 100), whole.leading.documents) == (600, True, 2)
    plain = prepare(corpus, tokenizer, context=16, validation_bytes=100)
    assert whole.leading.ids.tolist() == plain.validation.ids.tolist()
    assert whole.fingerprint == prepare(corpus, tokenizer, context=16, leading_bytes=None).fingerprint


def test_fingerprint_tells_tokens_and_vocabulary_apart():
    base = packing_module.TokenData(stream_of(9), stream_of(5), 20, "x").fingerprint
    assert base != packing_module.TokenData(stream_of(9), stream_of(6), 20, "x").fingerprint
    assert base != packing_module.TokenData(stream_of(5), stream_of(9), 20, "x").fingerprint
    assert base != packing_module.TokenData(stream_of(9), stream_of(5), 21, "x").fingerprint
    assert base == packing_module.TokenData(stream_of(9), stream_of(5), 20, "another title").fingerprint


def test_little_text_is_said_and_enough_is_not():
    tokenizer = make_tokenizer("bytes")
    little = prepare(corpus_of(["train " * 50], ["held out " * 9]), tokenizer, context=16)
    assert little.notes == (
        "warning: little text: 20 contexts of 16 tokens to train on and 5 held out (below 100 and 20 numbers say "
        "little about any other text): give more",
    )
    enough = prepare(corpus_of(["a" * 15 * 100], ["x" * 15 * 20]), tokenizer, context=16)
    assert enough.notes == ()


def lossy(kind: str) -> PreTrainedTokenizerFast:
    """Tokenizers as people have them, none of them spelt in bytes."""
    if kind == "eight words":
        vocabulary = {word: index for index, word in enumerate(("?", "the", "a", "cat", "dog", "sat", "on", "."))}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
        words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token=".")
    letters = {"?": 0, ".": 1, "\u2581": 2} | {letter: i for i, letter in enumerate("abcdefghijklmnopqrstuvwxyz ,é", 3)}
    if kind != "composed":
        letters |= {"e\u0301": len(letters), "\u0301": len(letters) + 1}
    made = Tokenizer(models.BPE(vocab=letters, merges=[], unk_token="?"))
    if kind == "composed":  # another spelling of the same letters comes back
        made.normalizer = normalizers.NFC()
    elif kind == "lower case":
        made.normalizer = normalizers.Lowercase()
    elif kind == "sentencepiece":  # a space before every text, which decoding takes away, or leaves
        made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    elif kind == "leading space":
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse()])
    if kind in ("composed", "lower case"):
        made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="?", eos_token=".", clean_up_tokenization_spaces=True
    )


@pytest.mark.parametrize(
    ("kind", "text", "lost"),
    [
        ("eight words", "The cat sat on a big mat", 8),  # comes back as "the cat sat on a": T, b, i, g, m, a, 2 spaces
        ("eight words", "the  cat", 1),
        ("lower case", "a Cat and A DOG", 5),
        ("lower case", "a cat , and a dog", 0),
        ("composed", "cafe\u0301", 3),
        ("composed", "café", 0),
        ("sentencepiece", "a cat , and a dog", 0),
        ("sentencepiece", " a  cat", 0),
        ("sentencepiece", "a Cat", 1),
        ("leading space", "a cat , and a dog", 0),
    ],
)
def test_the_share_of_text_that_tokens_do_not_carry(kind, text, lost):
    stream = pack_documents([Document("a", text)], lossy(kind))
    assert stream.lost == pytest.approx(lost / len(text.encode())) and stream.bytes == len(text.encode())


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_tokenizers_of_bytes_lose_nothing(spec):
    texts = ["naïve <|endoftext|> café \U0010ffff\r\n\t x . , n't", " the cat sat on the mat" * 20]
    assert pack_documents([Document("a", text) for text in texts], make_tokenizer(spec, texts * 9)).lost == 0.0


def test_a_lossy_tokenizer_is_refused_and_a_little_loss_is_said():
    text = "a cat sat on a dog , " * 60
    with pytest.raises(
        HeadloomError, match=r"at least 4\.8% of the held-out bytes do not come back.* \('bytes', 'bpe:4096'"
    ):
        prepare(corpus_of([text], [text.replace("dog", "Dog")]), lossy("lower case"), context=16)
    data = prepare(corpus_of([text], [text + "A"]), lossy("lower case"), context=16)
    assert data.notes[-1] == "warning: the tokenizer loses at least 0.08% of the held-out bytes"
    assert data.validation.lost == pytest.approx(1 / 1261) and data.train.lost is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: prepare(corpus_of(["short"], ["x" * 15]), make_tokenizer("bytes"), context=16),
            "a corpus gives 7 tokens to train on and 17 held out; a context of 16 needs at least 61 and 16",
        ),
        (
            lambda: prepare(corpus_of(["a" * 99], ["x"]), make_tokenizer("bytes"), context=16),
            "101 tokens .* and 3 held out",
        ),
        (lambda: prepare(corpus_of(["a" * 99], ["x"]), make_tokenizer("bytes"), context=1), "context=1"),
        (
            lambda: prepare(corpus_of(["a" * 99], ["x"]), make_tokenizer("bytes"), context=9, validation_bytes=0),
            "validation_bytes=0",
        ),
        (
            lambda: prepare(corpus_of(["a" * 99], ["é"]), make_tokenizer("bytes"), context=9, validation_bytes=1),
            "first character",
        ),
        (lambda: row_order(0, 0, 0, 4), "cannot order 0 rows"),
    ],
)
def test_too_little_is_said(call, words):
    with pytest.raises(HeadloomError, match=words):
        call()
