"""Corpora: what is read, how it is split, and every bad input."""

from __future__ import annotations

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from headloom.core.errors import HeadloomError
from headloom.data import Corpus, load_corpus
from headloom.data import corpus as corpus_module


def names(corpus: Corpus) -> list[str]:
    return [document.name for document in (*corpus.train, *corpus.validation)]


def write_parquet(path: Path, **columns: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


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


def test_tables_give_a_document_a_row(tmp_path):
    rows = [f"row number {index}" for index in range(30)]
    (tmp_path / "t.jsonl").write_text(
        "".join(json.dumps({"text": row, "n": 1}) + "\n" for row in rows), encoding="utf-8"
    )
    write_parquet(tmp_path / "t.parquet", n=[1] * 30, text=rows)
    for name in ("t.jsonl", "t.parquet"):
        corpus = load_corpus(tmp_path / name)
        assert sorted(d.text for d in (*corpus.train, *corpus.validation)) == sorted(rows)
        assert len(corpus.validation) >= 1


ROWS = [f'row number {index}, "quoted"\nand a second line' for index in range(30)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A data set as `save_to_disk` leaves it, and one with splits."""
    import datasets

    datasets.disable_progress_bars()
    root = tmp_path_factory.mktemp("saved")
    one = datasets.Dataset.from_dict({"text": ROWS, "n": list(range(30)), "body": ROWS[::-1]})
    one.save_to_disk(root / "one")
    few = {"train": one, "validation": one.select([3, 4]), "test": one.select([5])}
    datasets.DatasetDict(few).save_to_disk(root / "splits")
    datasets.DatasetDict(train=one, test=one.select([5])).save_to_disk(root / "tested")
    datasets.DatasetDict(a=one, b=one).save_to_disk(root / "odd")
    datasets.enable_progress_bars()
    return root


def texts(documents) -> list[str]:
    return [document.text for document in documents]


def test_a_saved_data_set_is_its_rows_and_not_its_json(saved):
    corpus = load_corpus(saved / "one")
    assert sorted(texts((*corpus.train, *corpus.validation))) == sorted(ROWS)
    assert corpus.title.startswith("data set 'one': 30 documents") and corpus.left_out == ""


def test_a_data_sets_own_validation_split_is_the_validation_text(saved):
    corpus = load_corpus(saved / "splits")
    assert texts(corpus.validation) == [ROWS[3], ROWS[4]]
    assert texts(corpus.train) == [row for row in ROWS if row not in (ROWS[3], ROWS[4])], "none of it is trained on"
    assert "trained on its split 'train', validated on 'validation'" in corpus.title
    assert "split 'test' 1; texts that repeat another 2" in corpus.left_out
    corpus = load_corpus(saved / "tested", limit_bytes=100)
    assert texts(corpus.validation) == [ROWS[5]] and "validated on 'test'" in corpus.title and "cut at" in corpus.title
    with pytest.raises(HeadloomError, match="has the splits a, b, but none called 'train'"):
        load_corpus(saved / "odd")


def test_damaged_and_inner_data_sets_and_models(saved, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(saved / "one", broken)
    (broken / "state.json").write_text("{}")
    with pytest.raises(HeadloomError, match="looks like a data set that save_to_disk wrote, but it cannot be loaded"):
        load_corpus(broken)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model" / "merges.txt").write_text("a b")
    with pytest.raises(HeadloomError, match="holds a model"):
        load_corpus(tmp_path / "model")
    write_folder(tmp_path, 4)
    corpus = load_corpus(tmp_path)
    assert len(names(corpus)) == 4
    assert corpus.left_out == f"left out of folder '{tmp_path.name}': data sets inside 1; models 1"


@pytest.mark.parametrize("kind", ["t.csv", "t.tsv", "t.parquet", "t.jsonl", "t.json", "lines.json", "saved", "hub"])
def test_the_text_is_that_of_the_column_that_was_named(tmp_path, monkeypatch, saved, kind):
    table = {"text": ["wrong"] * 30, "n": list(range(30)), "body": ROWS}
    records = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
    source = tmp_path / kind
    if kind == "t.parquet":
        write_parquet(source, **table)
    elif kind in ("t.csv", "t.tsv"):
        with source.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == "t.csv" else "\t")
            writer.writerows([list(table), *zip(*table.values(), strict=True)])
    elif kind == "t.json":
        source.write_text(json.dumps(records))
    elif kind == "saved":
        source = saved / "one"
    elif kind == "hub":
        monkeypatch.setattr("datasets.load_dataset", lambda *_, **__: iter(records))
        monkeypatch.chdir(tmp_path)
        source = "someone/stories"
    else:
        source.write_text("".join(json.dumps(record) + "\n" for record in records))
    corpus = load_corpus(source, text_column="body")
    assert sorted(texts((*corpus.train, *corpus.validation))) == sorted(ROWS)
    with pytest.raises(HeadloomError, match=r"no 'bodi' column; it has: .*body.* Did you mean 'body'"):
        load_corpus(source, text_column="bodi")
    if kind not in ("t.csv", "t.tsv"):  # in which everything is text
        with pytest.raises(HeadloomError, match="'n' is int, not a string"):
            load_corpus(source, text_column="n")


def test_a_number_in_a_csv_is_text_as_it_is_spelt(tmp_path):
    path = bad(tmp_path, "t.csv", b"\xef\xbb\xbfid,text\n1,007\n2,\n3,1.50\n4,True\n")
    corpus = load_corpus(path)
    assert sorted(texts((*corpus.train, *corpus.validation))) == ["007", "1.50", "True"]
    assert corpus.left_out == "left out of file 't.csv': blank texts 1"


def test_a_column_for_what_has_none_is_refused(tmp_path):
    for spec in ("stdlib", bad(tmp_path, "a.txt", b"text of a"), tmp_path):
        with pytest.raises(
            HeadloomError, match=r"text_column='body' names a column of a table, and .* leave --text-column"
        ):
            load_corpus(spec, text_column="body")


def test_everything_left_out_of_a_folder_is_counted_and_said(tmp_path):
    write_folder(tmp_path / "texts", 4)
    root = tmp_path / "texts"
    for name, content in {
        "a.bin": b"\0", "b.bin": b"\0", "noending": b"\xff", "c.txt.gz": b"\x1f\x8b", "n.ipynb": b"{}",
        "package.json": b'{"name": "x"}', "rows.json": b'[{"text": "read"}]', ".env": b"x", "blank.md": b"\n",
        "copy.txt": b"document 0\n", "nulls.jsonl": b'{"text": null}\n{"text": "kept"}\n',
    }.items():  # fmt: skip
        bad(root, name, content)
    (root / ".git").mkdir()
    bad(root / ".git", "HEAD", b"ref")
    (root / "link.txt").symlink_to(root / "a.bin")
    corpus = load_corpus(root)
    assert len(names(corpus)) == 6 and {"read", "kept"} <= set(texts((*corpus.train, *corpus.validation)))
    assert corpus.left_out.startswith("left out of folder 'texts': ")
    assert set(corpus.left_out.removeprefix("left out of folder 'texts': ").split("; ")) == {
        "hidden 2",
        "links 1",
        "not UTF-8 text 5 (.bin 2, .gz 1, .ipynb 1, no ending 1)",
        "blank texts 1",
        "JSON without 'text' rows 1 (.json 1)",
        "rows without text 1",
        "texts that repeat another 1",
    }
    (tmp_path / "none").mkdir()
    bad(tmp_path / "none", "picture.png", b"\x89PNG\0")
    with pytest.raises(HeadloomError, match=r"no text in folder 'none'.*\(left out: not UTF-8 text 1 \(.png 1\)\)"):
        load_corpus(tmp_path / "none")


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
        ("ragged.csv", b"text,id\na,1\nb,2,3\n", "no table in UTF-8 whose first line names its columns"),
        ("latin.csv", b"text\ncaf\xe9\n", "no table in UTF-8"),
        ("empty.csv", b"", "no table in UTF-8"),
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


def test_parquet_without_text_says_what_it_has(tmp_path):
    write_parquet(tmp_path / "t.parquet", content=["a"], id=[1])
    with pytest.raises(HeadloomError, match="no 'text' column; it has: content, id"):
        load_corpus(tmp_path / "t.parquet")


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
