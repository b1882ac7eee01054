import base64
import csv
import hashlib
import json
import re
import subprocess
import sys

import pytest
from report.reading import ALL, FIGURES, HOSTILE, Page, drawings, read

from headloom.core.errors import HeadloomError
from headloom.report.page import inert_json, write_report


def test_contents(written):
    page = Page(read(written))
    results = json.loads((written / "results.json").read_text())
    for headline in results["headlines"]:
        assert headline in page.text
    assert page.text.index(results["headlines"][0]) < page.text.index("What was found")
    for part in ("invented text", "f" * 64, "bits per byte: counted somehow", "Invented CPU", "torch 2.13.0"):
        assert part in page.text
    assert "headloom compare --steps 120" in page.text
    assert {attrs.get("id") for _, attrs in page.elements} >= {f"figure-{name}" for name in FIGURES}
    assert "mean loss of 2 steps" in page.text  # 120 steps in at most 80 points


def row_of(page, label, times=1):
    """The cells after the `times`-th one that holds just the label."""
    cells = [cell.replace("\u00a0", " ") for cell in page.cells]
    place = -1
    for _ in range(times):
        place = cells.index(label, place + 1)
    return cells[place : place + 12]


def test_the_tables_hold_the_results(written):
    page = Page(read(written))
    results = json.loads((written / "results.json").read_text())
    mean = results["variants"][2]["bits_per_byte"]["mean"]
    assert row_of(page, "iha")[:5] == ["iha", f"{mean:.4f} ± 0.0040", f"{mean - 2.4:+.4f} ± 0.0080", "worse", "3.00"]
    assert row_of(page, "iha", 2)[:3] == ["iha", f"{mean - 2.408:+.4f} to {mean - 2.392:+.4f}", "0.03"]
    cost = row_of(page, "iha", 3)[:10]
    assert cost[:4] == ["iha", "853,122 (+0.02%)", "4 x 128 x 8", "3.704 M"]
    assert cost[4:7] == ["192 G / 230.4 G", "4.096 k / 266.2 k", "150 ms (3.00 x)"]
    assert cost[7:] == ["120 / 61.44 k", "0.003", "pseudo_heads=2"]
    for absent in ("bits per byte at mha's time", "more seeds to settle it"):  # this folder has neither
        assert absent not in page.cells
    assert "95 % interval (bootstrap)" not in page.cells  # no variant has one


def test_the_tables_of_a_whole_study(whole):
    page = Page(read(whole))
    found = json.loads((whole / "results.json").read_text())["variants"][2]
    mean, low = found["bits_per_byte"]["mean"], found["difference"]["bootstrap_low"]
    row = row_of(page, "iha:pseudo_heads=2")
    assert row[1] == f"{mean:.4f} ± 0.0040, 2 of 3 seeds"
    assert row[4:8] == ["3.00", "2.5200", "+0.1000 ± 0.2500", "-"]  # it is settled
    assert page.cells.count("about 140") == 1  # 137, in two figures
    row = row_of(page, "iha:pseudo_heads=2", 3)  # the second is that of the failed run
    assert row[2].startswith(f"{low:+.4f} to ")
    assert row[3:5] == ["0.03", "+2.5"]
    assert "options" not in page.cells  # the label says them
    cost = row_of(page, "iha:pseudo_heads=2", 4)
    assert cost[2:6] == ["4 x 128 x 8", "3.704 M", "160 G / 192 G", "4.096 k / 116.5 k"]
    assert cost[7:10] == ["100 / 51.2 k", "15 s", "0.003"]
    assert "0.01 (edge)" in page.cells


def test_failed_runs_are_listed_with_their_reasons(whole):
    page = Page(read(whole))
    assert "1 of 36 runs failed" in page.text
    place = page.cells.index("seed 1, rate 0.003")
    assert page.cells[place - 1] == "iha:pseudo_heads=2"
    reason = page.cells[place + 1]
    assert reason.startswith("<img src=x onerror=alert(3)>xxx")
    assert reason.endswith("(the whole is in runs/v2-lr0.003-seed1/failure.json)")
    assert len(reason) < 500


def test_what_was_measured_on_what(whole):
    text = Page(read(whole)).text
    for part in (
        "Headloom study: equal_time",
        "at equal parameters (within 0.5 %) and equal time",
        "equal time within 2.0 % by steps",
        "50,000 selection tokens",
        "e" * 64,
        "mha 50 ms (49 ms to 60 ms)",
        "at the grid's edge",
        "tiny: 4 layers, width 128, 8 heads, 853,120 parameters (mha)",
        "120 steps (mha) of 8 sequences of 65 tokens, 6.1 % of the training text, 3 seeds",
        "Invented CPU, 2 cores, a run on 1 thread",
        "bits per byte of a part: counted somehow",
        "read where its steps times its measured step time",
        "|m| >= (t(1 - 0.05/2k, N-1) + t(0.8, N-1)) s / sqrt(N)",
    ):
        assert part in text, part
    date = text.index("Begun2026-01-01")
    assert date < text.index(HOSTILE, date) < text.index("What was found") < text.index("Held-out quality along")


def test_the_page_says_each_sentence_once(whole):
    page = Page(read(whole))
    text = re.sub(r"\s+", " ", page.text)
    said = [sentence for sentence in re.split(r"(?<=[.;]) ", text) if len(sentence) > 60]
    assert sorted(s for s in said if text.count(s) > 1) == []
    assert "is something against" not in text  # the summary and the table say it


def test_the_drawings_hold_what_the_runs_recorded(written):
    panels, datasets = drawings(Page(read(written)))
    assert list(panels) == list(FIGURES)
    results = json.loads((written / "results.json").read_text())
    drawn = {(mark["variant"], mark["seed"]): (mark["time"], mark["bits"]) for mark in datasets["quality-runs"]}
    assert drawn == {
        (run["variant"], run["seed"]): (run["train_seconds"], run["bits_per_byte"]) for run in results["runs"]
    }


def test_the_data_lie_beside_the_page(whole):
    results = json.loads((whole / "results.json").read_text())
    with open(whole / "figures" / "quality.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    bits = {(row["variant"], int(row["seed"])): float(row["bits"]) for row in rows}
    done = [run for run in results["runs"] if run["chosen"] and run["status"] == "finished"]
    assert bits == {(run["variant"], run["seed"]): run["bits_per_byte"] for run in done}
    assert len(bits) == 11
    for name in ("held-out", "difference", "loss", "learning-rates", "mixes"):
        assert (whole / "figures" / f"{name}.csv").read_text().count("\n") > 3
    links = {attrs["href"] for tag, attrs in Page(read(whole)).elements if tag == "a"}
    assert len(links) == 2 * len(ALL) + 6
    assert all((whole / link).is_file() for link in links)


def test_nothing_is_fetched(written, whole):
    for folder in (written, whole):
        page = Page(read(folder))
        for tag, attrs in page.elements:
            if tag == "a":  # the files beside the page, followed by a reader's click alone
                assert re.fullmatch(r"figures/[a-z0-9-]+\.(svg|png|csv)", attrs["href"])
                continue
            for name in ("src", "href", "action", "data", "srcset", "poster", "background"):
                assert (attrs.get(name) or "data:").startswith("data:"), (tag, name, attrs[name])
        assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
        style = read(folder).split("<style>")[1].split("</style>")[0]
        assert "url(" not in style
        assert "@import" not in style
        assert '"url"' not in page.scripts[0]


def test_the_policy_admits_exactly_the_scripts_of_the_page(written):
    text = read(written)
    page = Page(text)
    policy = next(attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(page.scripts) == 3


def test_one_bundle_and_below_three_megabytes(tmp_path, make_study, monkeypatch):
    """Forty runs, mixes of thirty layers from ten variants, and stills that are large: the page holds what fits."""
    monkeypatch.setattr("headloom.report.stills.svg", lambda spec: "<svg>" + " " * 200_000)
    monkeypatch.setattr("headloom.report.stills.png", lambda drawn: b"")
    labels = [f"iha:pseudo_heads={place}" for place in range(10)]
    make_study(tmp_path, labels, seeds=range(4), steps=400, rates=(1e-3, 3e-3), mixes=labels, layers=30)
    results = json.loads((tmp_path / "results.json").read_text())
    results["runs"] = [run for run in results["runs"] if run["chosen"]]
    assert len(results["runs"]) == 40
    (tmp_path / "results.json").write_text(json.dumps(results))
    text = read(write_report(tmp_path).parent)
    assert len(text.encode()) < 3_000_000
    assert text.count("window.vegaEmbed=") == 1
    page = Page(text)
    panels, datasets = drawings(page)
    points = [row for row in datasets["loss-seeds"] if row["variant"] == labels[0] and row["seed"] == 0]
    assert len(points) == 80
    assert points[-1]["step"] == 400  # thinned, and the last step is kept
    assert len([name for name in panels if name.startswith("mixes-")]) == 8
    assert "24 of 120 maps are drawn (layers 0, 6, 12, 17, 23, 29); all are in runs/" in page.text
    assert "iha:pseudo_heads=9: not drawn" in page.text
    assert text.count('<img class="still"') == 3
    assert "See figures/mixes-8.png." in text


def test_hostile_names_are_inert(whole):
    text = read(whole)
    page = Page(text)
    assert len(page.scripts) == 3  # figures, library, our own
    assert [tag for tag, attrs in page.elements if tag == "img" and not attrs["src"].startswith("data:")] == []
    assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]
    assert HOSTILE in page.text
    assert "<img src=x onerror=alert(3)>" in page.text
    assert "<script>alert" not in text
    _, datasets = drawings(page)
    assert HOSTILE in {row["variant"] for row in datasets["loss-seeds"]}
    for name in ALL:
        assert "<script" not in (whole / "figures" / f"{name}.svg").read_text()


def test_figures_are_saved(whole):
    for name in ALL:
        assert (whole / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (whole / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_light_and_dark_and_narrow(written):
    text = read(written)
    assert "@media screen and (prefers-color-scheme: dark)" in text
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    for tag, attrs in Page(text).elements:
        if tag == "div" and attrs.get("aria-label") == "Results of every variant":
            assert attrs["class"] == "scroll"
            break
    else:
        pytest.fail("the table has no box of its own to scroll in")


def test_a_study_with_nothing_finished_still_has_a_page(tmp_path, make_study):
    results = make_study(tmp_path, labels=("mha", "iha"), seeds=(0,))
    which = ("variant", "seed", "learning_rate", "folder", "chosen")
    results["runs"] = [{**{key: run[key] for key in which}, "status": "waiting"} for run in results["runs"]]
    for variant in results["variants"]:
        variant["bits_per_byte"] = {"n": 0, "mean": None, "sd": None, "values": {}}
        variant["difference"] = None
        variant["step_time"] = variant["step_ratio"] = None
    (tmp_path / "results.json").write_text(json.dumps(results))
    for metrics in tmp_path.glob("runs/*/metrics.jsonl"):
        metrics.unlink()
    text = Page(write_report(tmp_path).read_text()).text
    assert "2 of 2 runs have not been made yet" in text
    assert "no finished run" in text


def test_writing_again_gives_the_same_page(written):
    before = read(written)
    write_report(written)
    assert read(written) == before
    assert not list(written.glob(".report*"))


def test_a_folder_without_a_study(tmp_path):
    with pytest.raises(HeadloomError, match=r"holds no study\.json"):
        write_report(tmp_path)
    (tmp_path / "study.json").write_text("[1]")
    with pytest.raises(HeadloomError, match="list"):
        write_report(tmp_path)


@pytest.mark.parametrize("text", ["</script>", "<!--", "a&b", "\u2028"])
def test_inert_json_is_json_without_markup(text):
    written = inert_json({"x": text})
    assert json.loads(written) == {"x": text}
    assert not set("<>&\u2028") & set(written)


def test_the_report_never_imports_torch(tmp_path, make_study):
    make_study(tmp_path, labels=("mha", "iha"))
    code = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"  # an import of either raises
        "from headloom.report.page import write_report\n"
        f"write_report({str(tmp_path)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=900)
    assert (tmp_path / "report.html").exists()
