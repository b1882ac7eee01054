"""Tokenizers: bytes exactly, BPE reproducibly, saved ones without their code."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from headloom.core.errors import HeadloomError
from headloom.data import tokenizer as tokenizer_module
from headloom.data.corpus import load_corpus
from headloom.data.tokenizer import make_tokenizer, token_bytes

TEXTS = ["the cat sat on the mat. " * 20, "def run(config):\n    return config.seed\n" * 20, "naïve café, 你好 " * 20]


def arbitrary_text(seed: int) -> str:
    draw = random.Random(seed)
    codes = [draw.randrange(0x110000) for _ in range(300)] + list(range(0x180)) + [0xFEFF, 0x10FFFF, 0x85, 0x2028]
    draw.shuffle(codes)
    return (
        "".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000)
        + "<|endoftext|> <|pad|>  \r\n\t\0. a . b , do n't 's !"
    )


@pytest.mark.parametrize("seed", range(4))
def test_bytes_round_trip_any_unicode_and_ids_are_the_bytes(seed):
    tokenizer, text = make_tokenizer("bytes"), arbitrary_text(seed)
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_bytes_has_258_ids_with_end_and_padding_apart():
    tokenizer = make_tokenizer("bytes")
    assert len(tokenizer) == 258
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id) == (256, 256, 257)
    assert token_bytes(tokenizer).tolist() == [1] * 256 + [0, 0]


@pytest.mark.parametrize("spec", ["bytes", "bpe:300"])
def test_saved_with_a_model_it_loads_the_same(tmp_path, spec):
    tokenizer, text = make_tokenizer(spec, TEXTS), arbitrary_text(9) + TEXTS[1]
    tokenizer.save_pretrained(tmp_path)
    for loaded in (AutoTokenizer.from_pretrained(tmp_path), make_tokenizer(str(tmp_path))):
        assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (loaded.eos_token_id, loaded.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_bpe_has_the_size_asked_for_merges_and_counts_its_bytes():
    tokenizer = make_tokenizer("bpe:300", TEXTS)
    assert len(tokenizer) == 300
    lengths = token_bytes(tokenizer)
    for text in (*TEXTS, arbitrary_text(3)):
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert int(lengths[ids].sum()) == len(text.encode())
    assert len(tokenizer(TEXTS[0])["input_ids"]) < len(TEXTS[0]) / 1.5


def test_bpe_is_the_same_in_another_process_with_other_threads():
    code = (
        "import hashlib; from headloom.data.corpus import load_corpus; "
        "from headloom.data.tokenizer import make_tokenizer\n"
        "texts = [d.text for d in load_corpus('stdlib', limit_bytes=300_000).train]\n"
        "print(hashlib.sha256(make_tokenizer('bpe:700', texts).backend_tokenizer.to_str().encode()).hexdigest())"
    )
    root = str(Path(tokenizer_module.__file__).parents[2])
    prints = [
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONPATH": root, "RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads},
        ).stdout
        for threads in ("1", "3")
    ]
    assert prints[0] == prints[1] and len(prints[0].strip()) == 64


def test_bpe_depends_on_the_training_text_only():
    corpus = load_corpus("stdlib", limit_bytes=200_000)
    texts = [document.text for document in corpus.train]
    same, other = make_tokenizer("bpe:400", texts), make_tokenizer("bpe:400", TEXTS * 3 + texts[:1])
    assert same.get_vocab() == make_tokenizer("bpe:400", texts).get_vocab()
    assert same.get_vocab() != other.get_vocab()


def test_token_bytes_refuses_a_tokenizer_not_spelt_in_bytes(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"日本": 0, "end": 1}, unk_token="日本"))
    with pytest.raises(HeadloomError, match="no byte-level tokenizer"):
        token_bytes(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="end"))


def test_a_saved_tokenizers_own_code_is_not_run(tmp_path):
    make_tokenizer("bytes").save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n", encoding="utf-8")
    config = tmp_path / "tokenizer_config.json"
    changed = json.loads(config.read_text()) | {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}
    config.write_text(json.dumps(changed | {"tokenizer_class": "Evil"}))
    try:
        make_tokenizer(tmp_path)
    except HeadloomError as error:
        assert "own code" in str(error)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("byte", "unknown tokenizer 'byte'. Did you mean 'bytes'"),
        ("nowhere", "unknown tokenizer 'nowhere'"),
        ("bpe", "names no vocabulary"),
        ("bpe:many", "names no vocabulary"),
        ("bpe:257", "256 bytes and 2 special tokens are the least"),
        ("bpe:90000", "yields only"),
    ],
)
def test_bad_specs_are_refused_in_one_line(spec, words):
    with pytest.raises(HeadloomError, match=words) as error:
        make_tokenizer(spec, TEXTS)
    assert "\n" not in str(error.value)


def test_folders_without_a_usable_tokenizer_are_refused(tmp_path):
    with pytest.raises(HeadloomError, match="holds no tokenizer"):
        make_tokenizer(tmp_path)
    tokenizer = make_tokenizer("bytes")
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "endless")
    with pytest.raises(HeadloomError, match="no end-of-text token"):
        make_tokenizer(tmp_path / "endless")


def test_a_name_on_the_hub_is_asked_there_and_a_folder_is_not(monkeypatch, tmp_path):
    from transformers import AutoTokenizer

    asked = []

    def from_pretrained(name, *, local_files_only, trust_remote_code):
        asked.append((name, local_files_only, trust_remote_code))
        raise OSError("nobody answers")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", from_pretrained)
    with pytest.raises(
        HeadloomError, match=r"'some/one' is no folder here, .* hub it does not load \(nobody answers\)"
    ):
        make_tokenizer("some/one")
    with pytest.raises(HeadloomError, match="holds no tokenizer that loads without its own code"):
        make_tokenizer(tmp_path)
    assert asked == [("some/one", False, False), (str(tmp_path), True, False)]
