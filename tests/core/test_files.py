"""Files that are absent, old, or complete."""

import pytest

from headloom.core import files
from headloom.core.files import read_json, replaced, write_bytes, write_json, write_text


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
