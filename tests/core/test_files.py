"""Files that are absent, old, or complete."""

import errno

import pytest
import torch
from safetensors import SafetensorError

from headloom.core import files
from headloom.core.errors import HeadloomError
from headloom.core.files import (
    DiskFull,
    is_full,
    read_json,
    replaced,
    whole_folder,
    write_bytes,
    write_csv,
    write_json,
    write_text,
)


def test_what_is_written_is_read(tmp_path):
    write_json(tmp_path / "a.json", {"name": "ä"})
    assert (tmp_path / "a.json").read_bytes() == '{\n  "name": "ä"\n}\n'.encode()
    assert read_json(tmp_path / "a.json") == {"name": "ä"}
    write_text(tmp_path / "a.txt", "1\r\n2\n")
    assert (tmp_path / "a.txt").read_bytes() == b"1\r\n2\n"
    write_bytes(tmp_path / "a.bin", b"\xff")
    assert (tmp_path / "a.bin").read_bytes() == b"\xff"


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff"])
def test_what_is_no_object_is_not_read(tmp_path, content):
    assert read_json(tmp_path / "a.json") is None
    (tmp_path / "a.json").write_bytes(content)
    assert read_json(tmp_path / "a.json") is None


def test_nan_is_refused_before_anything_is_written(tmp_path):
    write_json(tmp_path / "a.json", {"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"a": float("nan")})
    assert read_json(tmp_path / "a.json") == {"a": 1}


def test_a_write_that_breaks_leaves_the_old_file_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")
    with pytest.raises(RuntimeError), replaced(path) as stream:
        stream.write(b"half")
        raise RuntimeError

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(files.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def raised(error, cause=None):
    try:
        raise error from cause
    except Exception as caught:
        return caught


@pytest.mark.parametrize(
    ("error", "full"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), True),
        (OSError(errno.ENOENT, "No such file"), False),
        (OSError(errno.ENOENT, "No such file", "No space left on device"), False),
        (SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"), True),
        (SafetensorError("Error while deserializing header: invalid UTF-8"), False),
        (Exception("Disk quota exceeded (os error 122)"), True),
        (
            RuntimeError("[enforce fail at inline_container.cc:850] . PytorchStreamWriter failed writing file"),
            True,
        ),
        (ValueError("no room"), False),
        (raised(RuntimeError("cannot save"), OSError(errno.ENOSPC, "No space left on device")), True),
        (raised(RuntimeError("cannot save"), None), False),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_full_disk_in_every_librarys_words(error, full):
    assert is_full(error) is full


def test_torch_says_it_as_we_think(tmp_path, small_files):
    with small_files(5000), pytest.raises(RuntimeError) as caught:
        torch.save(torch.zeros(4000), tmp_path / "a.pt")
    assert is_full(caught.value)


def test_a_file_that_does_not_fit_is_one_line_and_the_old_one_stays(tmp_path, small_files):
    path = tmp_path / "a.json"
    write_text(path, "old")
    (tmp_path / "a.json.partial").write_text("mine")
    with small_files(1000), pytest.raises(DiskFull) as caught:
        write_text(path, "x" * 5000)
    assert f"the disk that holds '{path}' is full ([Errno 27] File too large): what was finished" in str(caught.value)
    assert sorted(entry.read_text() for entry in tmp_path.iterdir()) == ["mine", "old"]


def test_a_folder_is_whole_or_absent_and_nobody_elses_is_touched(tmp_path):
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "thesis.tex").write_text("mine")
    (tmp_path / "out.headloom-partial").mkdir()  # of a process that was killed
    (tmp_path / "out.headloom-partial" / "half").write_text("")
    for error, shown in (
        (OSError(errno.ENOSPC, "No space left on device"), DiskFull),
        (SafetensorError("I/O error: No space left on device (os error 28)"), DiskFull),
        (OSError(errno.EACCES, "Permission denied"), HeadloomError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ):
        with pytest.raises(shown), whole_folder(tmp_path / "out") as partial:
            (partial / "half").write_text("")
            raise error
        assert [entry.name for entry in tmp_path.iterdir()] == ["out.partial"]
    with whole_folder(tmp_path / "out") as partial:
        (partial / "whole").write_text("")
    assert [entry.name for entry in (tmp_path / "out").iterdir()] == ["whole"]
    with pytest.raises(HeadloomError, match="cannot be written"), whole_folder(tmp_path / "out"):
        pass
    assert (tmp_path / "out" / "whole").exists() and (tmp_path / "out.partial" / "thesis.tex").read_text() == "mine"


def test_csv_quotes(tmp_path):
    write_csv(tmp_path / "a.csv", ("x", "y"), [("a,b", 1), ('say "hi"', None)])
    assert (tmp_path / "a.csv").read_text() == 'x,y\n"a,b",1\n"say ""hi""",\n'
