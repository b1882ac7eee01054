"""Tables, saved data sets and mixed folders: what is read as text, by which column, and what is left out."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from headloom.core.errors import HeadloomError
from headloom.data.corpus import check_corpus, load_corpus


def write_parquet(path: Path, **columns: list) -> Path:
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


def few_texts(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    for index in range(4):
        (root / f"{index}.txt").write_text(f"document {index}\n" * (index + 1), encoding="utf-8")
    return root


def bad(root: Path, name: str, content: bytes) -> Path:
    path = root / name
    path.write_bytes(content)
    return path


def texts(documents) -> list[str]:
    return [document.text for document in documents]


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
    few_texts(tmp_path)
    corpus = load_corpus(tmp_path)
    assert len((*corpus.train, *corpus.validation)) == 4
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


@pytest.mark.parametrize(("kind", "package"), [("t.parquet", "pyarrow"), ("one", "datasets"), ("a/b", "datasets")])
def test_a_missing_package_is_named_before_anything_is_read(tmp_path, monkeypatch, saved, kind, package):
    write_parquet(tmp_path / "t.parquet", text=ROWS)
    few_texts(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, package, None)
    source = saved / kind if kind == "one" else kind
    needs = rf"{kind}'.* read with the package '{package}', which is not installed: pip install 'headloom\[data\]'"
    for refused in (check_corpus, load_corpus):
        with pytest.raises(HeadloomError, match=needs):
            refused(source)
    if kind == "t.parquet":
        with pytest.raises(HeadloomError, match=needs):
            load_corpus(tmp_path)  # which holds it, beside texts


def test_a_csv_may_have_long_values_and_says_which_line_is_wrong(tmp_path):
    long = "a word, and another " * 20_000  # longer than Python's reader takes by default
    rows = [["text", "n"], [long, 1], [], ["second\nline", 2]]
    with (tmp_path / "t.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    corpus = load_corpus(tmp_path / "t.csv")
    assert sorted(texts((*corpus.train, *corpus.validation))) == [long, "second\nline"]
    with pytest.raises(HeadloomError, match=r"line 3 has 3 values, and there are 2 columns"):
        load_corpus(bad(tmp_path, "ragged.csv", b"text,id\na,1\nb,2,3\n"))
    with pytest.raises(HeadloomError, match="not a table in UTF-8"):
        load_corpus(bad(tmp_path, "open.csv", b'text,id\n"a,1\n'))


def test_a_column_for_what_has_none_is_refused(tmp_path):
    for spec in ("stdlib", bad(tmp_path, "a.txt", b"text of a"), tmp_path):
        with pytest.raises(
            HeadloomError, match=r"text_column='body' names a column of a table, and .* leave --text-column"
        ):
            load_corpus(spec, text_column="body")


def test_everything_left_out_of_a_folder_is_counted_and_said(tmp_path):
    root = few_texts(tmp_path / "texts")
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
    assert len((*corpus.train, *corpus.validation)) == 6 and {"read", "kept"} <= set(
        texts((*corpus.train, *corpus.validation))
    )
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


def test_parquet_without_text_says_what_it_has(tmp_path):
    write_parquet(tmp_path / "t.parquet", content=["a"], id=[1])
    with pytest.raises(HeadloomError, match="no 'text' column; it has: content, id"):
        load_corpus(tmp_path / "t.parquet")
