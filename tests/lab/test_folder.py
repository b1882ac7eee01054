import json

import pytest
from lab.manifests import hold

from headloom.core.errors import HeadloomError
from headloom.lab.plan.places import slug
from headloom.lab.run.folder import open_study_folder


def test_a_new_and_an_empty_folder_are_taken(tmp_path):
    assert open_study_folder(tmp_path / "a" / "b", "h", {}).joinpath("runs").is_dir()
    (tmp_path / "empty").mkdir()
    assert open_study_folder(tmp_path / "empty", "h", {}) == tmp_path / "empty"


def test_the_same_study_is_taken_and_another_refused_with_the_way_out(tmp_path):
    hold(tmp_path, "old", configs={"mha": {"steps": 100, "seed": 0}})
    assert open_study_folder(tmp_path, "old", {}) == tmp_path
    assert (
        open_study_folder(tmp_path, "grown", {"configs": {"a": {"steps": 100, "seed": 7}, "b": {"steps": 5}}})
        == tmp_path
    )
    with pytest.raises(HeadloomError) as caught:
        open_study_folder(tmp_path, "new", {"configs": {"mha": {"steps": 200, "seed": 1}}})
    message = str(caught.value)
    assert "holds another study (mha.steps 100 there, 200 here), and none of its runs can be used again" in message
    assert "choose another --out" in message
    assert "its own command" in message
    assert json.loads((tmp_path / "study.json").read_text())["hash"] == "old"


def test_a_folder_with_other_things_and_a_file_are_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(HeadloomError, match="not empty and holds no study"):
        open_study_folder(tmp_path, "h", {})
    with pytest.raises(HeadloomError, match="is a file"):
        open_study_folder(tmp_path / "thesis.tex", "h", {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_damaged_study_is_not_overwritten(tmp_path):
    (tmp_path / "study.json").write_text("{half")
    with pytest.raises(HeadloomError, match=r"study\.json' is damaged"):
        open_study_folder(tmp_path, "h", {})


def test_the_default_name_counts_up_and_finds_its_own_study_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert str(open_study_folder(None, "one", {})) == "headloom-compare"
    hold(tmp_path / "headloom-compare", "one")
    assert str(open_study_folder(None, "two", {})) == "headloom-compare-2"
    hold(tmp_path / "headloom-compare-2", "two")
    assert str(open_study_folder(None, "one", {})) == "headloom-compare"
    assert str(open_study_folder(None, "two", {})) == "headloom-compare-2"
    assert str(open_study_folder(None, "three", {})) == "headloom-compare-3"


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("iha", "iha"),
        ("iha:order=token", "iha-order=token"),
        ("../../x", "x"),
        ("<script>", "script"),
        ("..", "variant"),
    ],
)
def test_slugs_are_plain_names(label, name):
    assert slug(label) == name
