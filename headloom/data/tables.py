"""Rows of tables as texts: .jsonl, .json, .csv, .tsv, .parquet, data sets that `datasets` saved, and those of the hub.

Every reader yields the strings of one column. A row without a value (null) is left out and counted. A column that does
not exist, or whose values are not text, is refused. Parquet needs pyarrow, and data sets need datasets: both come with
`pip install 'headloom[data]'`.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError, near

TEXT = "text"
TABLES = (".jsonl", ".json", ".csv", ".tsv", ".parquet")
_LONGEST_FIELD = min(sys.maxsize, 2**31 - 1)  # of a CSV, in characters; by default Python's reader takes 131,072


class LeftOut:
    """What was not read, and why: counts by reason and file ending."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def add(self, why: str, ending: str = "") -> None:
        """One more file, row or document."""
        self.counts.setdefault(why, Counter())[ending] += 1

    def __str__(self) -> str:
        """In one phrase: "not UTF-8 text 3 (.bin 1, .png 2); hidden 1"; empty where nothing was left out."""
        parts = []
        for why, endings in self.counts.items():
            named = ", ".join(f"{ending} {count}" for ending, count in sorted(endings.items()) if ending)
            parts.append(f"{why} {endings.total()}" + (f" ({named})" if named else ""))
        return "; ".join(parts)


def need_package(package: str, what: str) -> None:
    """Raise HeadloomError unless a package of the extra `data` is installed. `what`: "file 'x.parquet'"."""
    if importlib.util.find_spec(package) is None:
        raise HeadloomError(
            f"{what} is read with the package '{package}', which is not installed: pip install 'headloom[data]'"
        )


def table_rows(path: Path, column: str, left: LeftOut) -> Iterator[str]:
    """The texts of one table. Raises HeadloomError when it is none, or has no such column of text."""
    ending = path.suffix.lower()
    if ending == ".parquet":
        return _parquet_rows(path, column, left)
    if ending in (".csv", ".tsv"):
        return _csv_rows(path, column, "," if ending == ".csv" else "\t")
    if ending == ".jsonl":
        return _jsonl_rows(path, column, left)
    rows = json_rows(path)
    if rows is None:
        raise HeadloomError(
            f"'{path}' is JSON, but holds no rows. Allowed: a list of objects, or one object a line, each with a "
            f"'{column}' field. To train on JSON as it is spelt, give the file the ending .txt."
        )
    return _texts(rows, column, f"'{path}'", left)


def json_rows(path: Path) -> list[Any] | None:
    """The objects in a .json file, a list of them or one a line; None where it holds anything else."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None
    try:
        found = json.loads(text)
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError:
            return None
    return found if isinstance(found, list) and found and all(isinstance(row, dict) for row in found) else None


def is_saved(folder: Path) -> bool:
    """Whether `save_to_disk` of `datasets` wrote this folder."""
    one = (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()
    return one or (folder / "dataset_dict.json").is_file()


def saved_splits(folder: Path, column: str, left: LeftOut) -> dict[str, Iterator[str]]:
    """The texts of a saved data set by split; a data set without splits has one, called "".

    Raises HeadloomError when it cannot be loaded, or a split has no such column of text.
    """
    need_package("datasets", f"data set '{folder}'")
    import datasets

    try:
        found = datasets.load_from_disk(str(folder))
    except Exception as error:  # of many kinds: files missing, JSON that lacks keys, Arrow's own
        raise HeadloomError(
            f"'{folder}' looks like a data set that save_to_disk wrote, but it cannot be loaded "
            f"({type(error).__name__}: {one_line(error)}): save it again, or give its texts as files"
        ) from error
    splits: Mapping[str, Any] = found if isinstance(found, datasets.DatasetDict) else {"": found}
    return {name: _saved_rows(split, column, f"'{folder / name}'", left) for name, split in splits.items()}


def hub_rows(name: str, column: str, left: LeftOut) -> Iterator[str]:
    """The text column of a Hugging Face data set's train split, streamed from its beginning. None of its code is run.

    Raises HeadloomError, one line, for whatever stops that.
    """
    need_package("datasets", f"Hugging Face data set '{name}'")
    try:
        import datasets

        yield from _texts(
            datasets.load_dataset(name, split="train", streaming=True), column, f"data set '{name}'", left
        )
    except HeadloomError:
        raise
    except Exception as error:  # the hub's own errors have no common base: network, missing name, gated, bad format
        raise HeadloomError(
            f"'{name}' is no file or folder here, and reading it as a Hugging Face data set failed: {one_line(error)} "
            "Pass a file, a folder, 'stdlib', or check the data set's name and the network."
        ) from error


def one_line(error: BaseException) -> str:
    """The first line of what a library says."""
    text = str(error).strip()
    return text.splitlines()[0][:200] if text else type(error).__name__


def _jsonl_rows(path: Path, column: str, left: LeftOut) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, raw in enumerate(lines, start=1):
            if not raw.strip():
                continue
            where = f"'{path}' line {number}"
            try:
                row = json.loads(raw)
            except (ValueError, UnicodeDecodeError) as error:
                raise HeadloomError(
                    f"{where} is not JSON ({error}). A .jsonl file holds one object with a '{column}' field a line."
                ) from None
            yield from _texts([row], column, where, left)


def _parquet_rows(path: Path, column: str, left: LeftOut) -> Iterator[str]:
    need_package("pyarrow", f"'{path}'")
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise HeadloomError(
            f"'{path}' is not a Parquet file ({one_line(error)}). Check the file or its ending."
        ) from None
    with table:
        _check(table.schema_arrow.names, column, f"'{path}'")
        for batch in table.iter_batches(batch_size=256, columns=[column]):
            yield from _texts(batch.to_pylist(), column, f"'{path}'", left)


def _csv_rows(path: Path, column: str, delimiter: str) -> Iterator[str]:
    """The first line names the columns; quoted values may hold commas, quotes and line ends."""
    csv.field_size_limit(_LONGEST_FIELD)
    try:
        with path.open(encoding="utf-8-sig", newline="") as stream:
            table = csv.reader(stream, delimiter=delimiter, strict=True)
            names = next(table, None)
            if names is None:
                raise csv.Error("it is empty")
            _check(names, column, f"'{path}'")
            place = names.index(column)
            for row in filter(None, table):
                if len(row) != len(names):
                    raise csv.Error(f"line {table.line_num} has {len(row)} values, and there are {len(names)} columns")
                yield row[place]
    except (csv.Error, OSError, UnicodeDecodeError) as error:
        raise HeadloomError(
            f"'{path}' is not a table in UTF-8 whose first line names its columns ({one_line(error)}). Check the file, "
            "or give it the ending .txt to read it as one text."
        ) from None


def _saved_rows(split: Any, column: str, where: str, left: LeftOut) -> Iterator[str]:
    _check(split.column_names, column, where)
    for row in split.select_columns([column]).with_format(None):
        yield from _texts([row], column, where, left)


def _texts(rows: Iterable[Any], column: str, where: str, left: LeftOut) -> Iterator[str]:
    for row in rows:
        if not isinstance(row, dict):
            raise HeadloomError(
                f"{where} holds {type(row).__name__}, not an object. Each row needs a '{column}' field."
            )
        _check(row, column, where)
        text = row[column]
        if text is None:
            left.add("rows without text")
        elif isinstance(text, str):
            yield text
        else:
            way = (
                "Lists, such as chat messages, must be written out as text first (a tokenizer's apply_chat_template)."
                if isinstance(text, list)
                else "Convert it, or name another column with --text-column."
            )
            raise HeadloomError(f"{where}: '{column}' is {type(text).__name__}, not a string. {way}")


def _check(columns: Iterable[Any], column: str, where: str) -> None:
    names = [str(name) for name in columns]
    if column not in names:
        raise HeadloomError(
            f"{where} has no '{column}' column; it has: {', '.join(names) or 'none'}.{near(column, names)} "
            "Say which one holds the text: --text-column NAME (text_column in Python and in files)."
        )
