"""Corpora: what is read, how it is split, and every bad input."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headloom.core.errors import HeadloomError
from headloom.data import corpus as corpus_module
from headloom.data.corpus import Corpus, load_corpus


def names(corpus: Corpus) -> list[str]:
    return [document.name for document in (*corpus.train, *corpus.validation)]


def write_folder(root: Path, count: int = 40) -> Path:
    for index in range(count):
        path = root / f"part{index % 3}" / f"{index:02d}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"document {index}\n" * (index + 1), encoding="utf-8")
    return root


def test_stdlib_is_sources_only_split_by_file_and_the_same_every_time():
    corpus = load_corpus("stdlib")
    again = load_corpus("stdlib")
    assert corpus.fingerprint == again.fingerprint and corpus == again
    found = names(corpus)
    assert "argparse.py" in found and "json/decoder.py" in found
    assert not [name for name in found if not name.endswith(".py") or name.startswith(("/", "test/", "site-packages/"))]
    assert not set(names(corpus)[: len(corpus.train)]) & {document.name for document in corpus.validation}
    train, validation = (
        sum(len(document.text.encode()) for document in split) for split in (corpus.train, corpus.validation)
    )
    assert train + validation > 5_000_000
    assert 0.04 < validation / (train + validation) < 0.2
    assert "standard library" in corpus.title and f"{train + validation:,} bytes" in corpus.title


def test_the_split_and_fingerprint_are_the_same_in_another_process(tmp_path):
    root = write_folder(tmp_path / "texts")
    code = "import sys; from headloom.data.corpus import load_corpus; print(load_corpus(sys.argv[1]).fingerprint)"
    other = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONHASHSEED": "7", "PYTHONPATH": str(Path(corpus_module.__file__).parents[2])},
    )
    assert other.stdout.strip() == load_corpus(root).fingerprint


def test_folder_is_split_by_document_and_the_split_depends_on_names_only(tmp_path):
    first = load_corpus(write_folder(tmp_path / "a"))
    for path in (tmp_path / "a").rglob("*.txt"):
        path.write_text(f"quite another text in {path.name}", encoding="utf-8")
    second = load_corpus(tmp_path / "a", seed=5)
    assert [d.name for d in first.validation] == [d.name for d in second.validation]
    assert len(names(first)) == len(set(names(first))) == 40
    assert 1 <= len(first.validation) <= 12
    assert [d.name for d in first.train] == sorted(d.name for d in first.train)
    assert first.fingerprint != second.fingerprint


def test_folder_leaves_out_what_is_not_text_and_repeated_texts(tmp_path):
    (tmp_path / "a.txt").write_text("alpha", encoding="utf-8")
    (tmp_path / "b.txt").write_text("alpha", encoding="utf-8")
    (tmp_path / "c.txt").write_text("gamma é", encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    (tmp_path / "zero.bin").write_bytes(b"ab\0cd")
    (tmp_path / "blank.txt").write_text(" \n", encoding="utf-8")
    (tmp_path / ".hidden.txt").write_text("hidden", encoding="utf-8")
    (tmp_path / "bom.txt").write_bytes(b"\xef\xbb\xbfdelta")
    (tmp_path / "rows.jsonl").write_text('{"text": "row one"}\n\n{"text": "row two"}\n', encoding="utf-8")
    corpus = load_corpus(tmp_path)
    texts = sorted(document.text for document in (*corpus.train, *corpus.validation))
    assert texts == ["alpha", "delta", "gamma é", "row one", "row two"]
    assert corpus.train and corpus.validation


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_documents_still_fill_both_splits(tmp_path, count):
    for index in range(count):
        (tmp_path / f"{index}.txt").write_text(f"text {index}", encoding="utf-8")
    corpus = load_corpus(tmp_path)
    assert corpus.train and corpus.validation and len(names(corpus)) == count


def test_documents_that_all_hash_to_validation_leave_one_to_train_on(tmp_path):
    chosen = [name for name in (f"{i}.txt" for i in range(200)) if corpus_module._position(name) < 0.1][:3]
    for name in chosen:
        (tmp_path / name).write_text(f"text of {name}", encoding="utf-8")
    corpus = load_corpus(tmp_path)
    assert (len(chosen), len(corpus.train), len(corpus.validation)) == (3, 1, 2)


def test_one_file_is_split_at_its_last_tenth(tmp_path):
    path = tmp_path / "one.txt"
    path.write_text("0123456789" * 10, encoding="utf-8")
    corpus = load_corpus(path)
    assert [d.text for d in corpus.train] == ["0123456789" * 9]
    assert [d.text for d in corpus.validation] == ["0123456789"]


def test_limit_takes_a_sample_fixed_by_seed(tmp_path):
    root = write_folder(tmp_path / "texts")
    whole = load_corpus(root)
    first, again, other = (load_corpus(root, limit_bytes=2000, seed=seed) for seed in (0, 0, 1))
    assert first == again and names(first) != names(other)
    for corpus in (first, other):
        assert sum(len(d.text.encode()) for d in (*corpus.train, *corpus.validation)) == 2000
        assert set(names(corpus)) < set(names(whole))
        assert "cut at 2,000" in corpus.title
    assert "cut" not in whole.title


def test_limit_never_splits_a_character(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("é" * 100, encoding="utf-8")
    corpus = load_corpus(path, limit_bytes=101)
    assert corpus.train[0].text + corpus.validation[0].text == "é" * 50
    assert "cut at 101" in corpus.title


@pytest.mark.parametrize("limit", range(30, 40))
def test_a_huge_file_is_read_no_further_than_the_limit(tmp_path, monkeypatch, limit):
    path = tmp_path / "huge.txt"
    path.write_bytes(b"\xef\xbb\xbf" + "你".encode() * 500 + b"\0 far beyond, not text")
    corpus = load_corpus(path, limit_bytes=limit)
    assert corpus.train[0].text + corpus.validation[0].text == "你" * (limit // 3)
    assert f"cut at {limit}" in corpus.title


def test_links_are_not_followed(tmp_path):
    root = write_folder(tmp_path / "texts")
    (tmp_path / "outside.txt").write_text("outside", encoding="utf-8")
    (root / "link.txt").symlink_to(tmp_path / "outside.txt")
    (root / "loop").symlink_to(root)
    assert len(names(load_corpus(root))) == 40


def test_a_file_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    path = tmp_path / "secret.txt"
    path.write_text("text", encoding="utf-8")

    def refuse(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(HeadloomError, match=r"secret.txt' cannot be read \(Permission denied\)"):
        load_corpus(tmp_path)


def test_hub_data_set_is_streamed_up_to_the_limit(monkeypatch, tmp_path):
    import datasets

    drawn = []

    def stream(name, *, split, streaming):
        assert (name, split, streaming) == ("someone/stories", "train", True)
        for index in range(10**9):
            drawn.append(index)
            yield {"text": f"story number {index}. "}

    monkeypatch.setattr(datasets, "load_dataset", stream)
    monkeypatch.chdir(tmp_path)
    corpus = load_corpus("someone/stories", limit_bytes=1000)
    assert sum(len(d.text) for d in (*corpus.train, *corpus.validation)) == 1000
    assert len(drawn) < 100 and "data set 'someone/stories'" in corpus.title


@pytest.mark.parametrize("case", ["no network", "no text column"])
def test_hub_failures_are_one_line(monkeypatch, tmp_path, case):
    import datasets

    def fail(*args, **kwargs):
        if case == "no network":
            raise ConnectionError("unreachable\nmore lines")
        return iter([{"content": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", fail)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HeadloomError, match="unreachable" if case == "no network" else "it has: content") as error:
        load_corpus("someone/stories")
    assert "\n" not in str(error.value)


def bad(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("empty.txt", b"", "no text in file 'empty.txt'"),
        ("blank.txt", b" \n\t", "no text in file"),
        ("nul.txt", b"a\0b", "not a text file"),
        ("latin.txt", b"caf\xe9", "not a text file"),
        ("tiny.txt", b"a", "too little to split"),
        ("bad.jsonl", b'{"text": "a"}\n{oops\n', "line 2 is not JSON"),
        ("list.jsonl", b"[1]\n", "holds list, not an object"),
        (
            "named.jsonl",
            b'{"texts": "a"}\n',
            "no 'text' column; it has: texts. Did you mean 'texts'.*--text-column NAME",
        ),
        (
            "chat.jsonl",
            b'{"text": [{"role": "user", "content": "hi"}]}\n',
            "'text' is list, not a string. Lists, such as",
        ),
        ("object.json", b'{"text": "a"}', "is JSON, but holds no rows"),
        ("names.csv", b"id,content\n1,a\n", "no 'text' column; it has: id, content. Did you mean 'content'"),
        ("ragged.csv", b"text,id\na,1\nb,2,3\n", "not a table in UTF-8 whose first line names its columns"),
        ("latin.csv", b"text\ncaf\xe9\n", "not a table in UTF-8"),
        ("empty.csv", b"", "not a table in UTF-8"),
        ("t.txt.gz", b"\x1f\x8b", "it is compressed: unpack it first"),
        ("a.ipynb", b'{"cells": []}', "it is a notebook: convert it"),
        ("data.arrow", b"ARROW1", "give the folder that save_to_disk wrote"),
        ("number.jsonl", b'{"text": 3}\n', "'text' is int, not a string"),
        ("bytes.jsonl", b'\xff\xfe{"text": 3}\n', "line 1 is not JSON"),
        ("empty.jsonl", b"\n", "no text in file"),
        ("bad.parquet", b"PAR0nonsense", "not a Parquet file"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path, name, content, words):
    with pytest.raises(HeadloomError, match=words) as error:
        load_corpus(bad(tmp_path, name, content))
    assert "\n" not in str(error.value)


def test_a_folder_without_text_is_refused(tmp_path):
    bad(tmp_path, "picture.png", b"\x89PNG\0\0")
    with pytest.raises(HeadloomError, match="no text in folder"):
        load_corpus(tmp_path)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("stdlb", "does not exist. Did you mean 'stdlib'"),
        ("novl.txt", "does not exist. Did you mean 'novel.txt'"),
        ("missing/novel.txt", "does not exist"),
        ("./missing/novel", "does not exist"),
        ("texts/novel", "does not exist. Did you mean 'novels'"),
    ],
)
def test_a_missing_path_suggests_its_neighbours(tmp_path, monkeypatch, spec, words):
    monkeypatch.chdir(tmp_path)
    bad(tmp_path, "novel.txt", b"text")
    (tmp_path / "texts" / "novels").mkdir(parents=True)
    with pytest.raises(HeadloomError, match=words) as error:
        load_corpus(spec)
    assert "owner/name" in str(error.value)


def test_limit_must_be_positive():
    with pytest.raises(HeadloomError, match="limit_bytes=0"):
        load_corpus("stdlib", limit_bytes=0)


def test_python_without_sources_is_told(monkeypatch, tmp_path):
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    with pytest.raises(HeadloomError, match="no standard-library sources"):
        load_corpus("stdlib")
