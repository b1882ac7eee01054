"""Records: folders of the version before are read, damaged and foreign files are refused in a sentence, and what a
study's end of a run costs does not grow."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from headloom.core.errors import HeadloomError
from headloom.lab.results.runs import RunReader
from headloom.lab.run.status import study_differences, study_status
from headloom.lab.spec.resolved import StudySpec
from headloom.records.arrays import WeightPicture, read_mixes, read_pictures, write_mixes, write_pictures
from headloom.records.files import RecordFile, checked
from headloom.records.manifest import STUDY
from headloom.records.metrics import read_metrics, read_train_lines
from headloom.records.reading import read_study
from headloom.records.results import RESULTS, FinishedRun, write_results
from headloom.records.runs import CONFIG, FAILURE, RESULT
from headloom.report.figures import all_sections

OLD = Path(__file__).parent / "old" / "compare"  # a comparison that the version before this one left, without arrays


@pytest.fixture
def old(tmp_path):
    return Path(shutil.copytree(OLD, tmp_path / "compare"))


def test_a_folder_of_the_version_before_is_read(old):
    study = read_study(old)
    assert study.labels == ["mha", "iha"] and [type(run) for run in study.results.runs] == [FinishedRun] * 4
    assert study.groups == {"mha": "mha", "iha": "mha"} and study.asked.budgets[0].match == "parameters"
    assert [section.name for section in all_sections(study)] == ["held-out", "difference", "quality", "loss"]
    assert study_status(old)["runs"] == {"finished": 4, "failed": 0, "waiting": 0}
    assert study_differences(f"{old}@mha", f"{old}@iha")["mechanism"] == {f"{old}@mha": "mha", f"{old}@iha": "iha"}
    assert len(read_train_lines(old / "runs/mha-seed0")) == 4
    assert RESULT.read(old / "runs/mha-seed0").bits_per_byte == study.finished[0].bits_per_byte


def test_results_are_written_as_the_version_before_wrote_them(old):
    study = read_study(old)
    write_results(old, study.results)
    for name in ("results.json", "results.csv"):
        assert (old / name).read_bytes() == (OLD / name).read_bytes()
    STUDY.write(old, study.manifest)
    before, after = (json.loads((folder / "study.json").read_text()) for folder in (OLD, old))
    assert (before["format"], after["format"]) == (2, 3)
    for spec in (before["spec"], before["resolved"]["spec"]):  # now it stands in a Hugging Face config, or nowhere
        del spec["rope_scaling"], spec["norm_eps"]
        spec["backbone"] = None
    assert after == {**before, "format": 3}


@pytest.mark.parametrize(
    ("file", "edit", "said"),
    [
        (RESULTS, lambda found: found.pop("hash"), "lacks the field 'hash'"),
        (RESULTS, lambda found: found.update(colour=1), "has the unknown field 'colour'"),
        (RESULTS, lambda found: found["variants"][0].pop("grid"), r"lacks the field 'variants\.0\.grid'"),
        (
            RESULTS,
            lambda found: found["variants"][1]["difference"].update(x=1),
            r"has the unknown field 'variants\.1\.difference\.x'",
        ),
        (RESULTS, lambda found: found.update(status="done"), "holds 'done', which is not .* in the field 'status'"),
        (RESULTS, lambda found: found.update(format=3), "has format 3, which a newer version .* use the newer version"),
        (RESULTS, lambda found: found.update(format=1), "has format 1, which .* no longer reads .* make it again"),
        (RESULTS, lambda found: found.pop("format"), "says no format"),
        (STUDY, lambda found: found["data"].pop("title"), r"lacks the field 'data\.title'"),
        (STUDY, lambda found: found["spec"].pop("seeds"), "lacks the field 'seeds'"),
    ],
)
def test_what_does_not_belong_is_refused_with_the_file_and_the_field(old, file, edit, said):
    found = json.loads((old / file.name).read_text())
    edit(found)
    (old / file.name).write_text(json.dumps(found))
    with pytest.raises(HeadloomError, match=rf"^'{re.escape(str(old / file.name))}' {said}") as caught:
        read_study(old)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{half", "[1]", "\0"])
@pytest.mark.parametrize("file", [CONFIG, RESULT, FAILURE], ids=lambda file: file.name)
def test_a_damaged_file_is_named(tmp_path, file, content):
    (tmp_path / file.name).write_text(content)
    with pytest.raises(HeadloomError, match=rf"{file.name}' is damaged"):
        file.read_if_there(tmp_path)


def test_an_absent_file_is_said_to_be(tmp_path):
    assert RESULT.read_if_there(tmp_path / "nowhere") is None
    with pytest.raises(HeadloomError, match=r"holds no result\.json: the run is not complete"):
        RESULT.read(tmp_path)


def test_the_step_from_an_older_format_is_taken(tmp_path):
    new = RecordFile("x.json", dict[str, int], format=3, upgrades={2: lambda fields: {**fields, "b": 2}})
    (tmp_path / "x.json").write_text('{"format": 2, "a": 1}')
    assert new.read(tmp_path) == {"a": 1, "b": 2}
    new.write(tmp_path, {"a": 1})
    assert json.loads((tmp_path / "x.json").read_text()) == {"format": 3, "a": 1}


def test_metrics_end_in_half_a_line_at_most(old):
    path = old / "runs/mha-seed0/metrics.jsonl"
    whole = path.read_text()
    path.write_text(whole + '{"kind": "tr')
    assert "".join(json.dumps(line.to_dict()) + "\n" for line in read_metrics(path.parent)) == whole
    path.write_text(whole.replace('"step": 2', '"stop": 2', 1))
    with pytest.raises(HeadloomError, match=r"metrics\.jsonl', line 2, lacks the field 'train\.step'"):
        read_train_lines(path.parent)


def test_arrays_come_back_and_broken_ones_are_named(tmp_path):
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    picture = WeightPicture(matrix, matrix + 1, ("0", "1"), ("a", "b", "c"), "head", "pseudo-head")
    write_mixes(tmp_path, {"layers.0.mix": matrix})
    write_pictures(tmp_path, {"layers.0.mix": picture})
    np.testing.assert_array_equal(read_mixes(tmp_path)["layers.0.mix"], matrix)
    found = read_pictures(tmp_path)["layers.0.mix"]
    np.testing.assert_array_equal(found.end - found.start, np.ones((2, 3)))
    assert (found.rows, found.columns, found.down, found.across) == (("0", "1"), ("a", "b", "c"), "head", "pseudo-head")
    write_mixes(tmp_path / "none", {})
    assert not (tmp_path / "none").exists()
    (tmp_path / "mixes.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(HeadloomError, match=r"mixes\.npz' is damaged"):
        read_mixes(tmp_path)


def test_a_finished_run_is_read_once(old, monkeypatch):
    """Whatever number of runs end after it."""
    manifest = STUDY.read(old)
    spec = checked(StudySpec, {k: v for k, v in manifest.spec.items() if k != "steps"}, old)
    reads = []
    real = RecordFile.parse
    monkeypatch.setattr(RecordFile, "parse", lambda file, text, path: reads.append(path) or real(file, text, path))
    late = old / "runs/iha-seed1"
    late.rename(old / "late")
    reader = RunReader(spec, old)
    assert [run.status for run, _ in reader.all()] == ["finished"] * 3 + ["waiting"]
    (old / "late").rename(late)
    assert [run.status for run, _ in reader.all()] == ["finished"] * 4
    assert sorted(path.parent.name for path in reads) == ["iha-seed0", "iha-seed1", "mha-seed0", "mha-seed1"]
    reader.forget()
    reader.all()
    assert len(reads) == 8
