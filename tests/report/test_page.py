import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from headloom.core.errors import HeadloomError
from headloom.report.page import inert_json, write_report

HOSTILE = "<script>alert(1)</script>"
FIGURES = ("difference", "loss-steps", "loss-seconds", "quality-time")


class Page(HTMLParser):
    """The page as a browser reads it: elements, texts, and the contents of its scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.cells, self.text = [], [], [], ""
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += data
        if self._open and self._open[-1] in ("td", "th"):
            self.cells[-1] += data


@pytest.fixture(scope="module")
def written(tmp_path_factory, make_study):
    folder = tmp_path_factory.mktemp("study")
    make_study(folder)
    write_report(folder)
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory, make_study):
    folder = tmp_path_factory.mktemp("hostile")
    results = make_study(folder, labels=("mha", HOSTILE, "</script><img src=x onerror=alert(2)>"), title=HOSTILE)
    results["runs"][3] |= {"status": "failed", "reason": "<img src=x onerror=alert(3)>"}
    results["variants"][1]["failed"] = [{"seed": 1, "reason": "'\"><script>alert(4)</script>"}]
    (folder / "results.json").write_text(json.dumps(results))
    write_report(folder)
    return folder


def read(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def test_contents(written):
    page = Page(read(written))
    results = json.loads((written / "results.json").read_text())
    for headline in results["headlines"]:
        assert headline in page.text
    assert page.text.index(results["headlines"][0]) < page.text.index("The table")
    for part in ("invented text", "f" * 64, "bits per byte: counted somehow", "Invented CPU", "torch 2.13.0"):
        assert part in page.text
    assert "headloom compare --steps 120" in page.text
    assert {attrs.get("id") for _, attrs in page.elements} >= {f"figure-{name}" for name in FIGURES}
    assert "mean loss of 2 steps" in page.text  # 120 steps in at most 80 points


def test_the_table_holds_the_results(written):
    page = Page(read(written))
    cells = [cell.replace("\u00a0", " ") for cell in page.cells]
    start = cells.index("iha")
    row = cells[start : start + 8]
    assert row[:6] == ["iha", "pseudo_heads=2", "853,122 (+0.02%)", "3.704 M", "4,096", "150 ms (3.00 x)"]
    results = json.loads((written / "results.json").read_text())
    mean = results["variants"][2]["bits_per_byte"]["mean"]
    assert row[6] == f"{mean:.4f} ± 0.0040"
    assert row[7] == f"{mean - 2.4:+.4f} ± 0.0080, worse"
    assert "reference" in cells


def test_the_drawings_hold_what_the_runs_recorded(written):
    page = Page(read(written))
    specs = json.loads(page.scripts[0])
    assert list(specs) == list(FIGURES)
    results = json.loads((written / "results.json").read_text())
    marks = specs["quality-time"]["layer"][0]["data"]["values"]
    drawn = {(mark["variant"], mark["seed"]): (mark["seconds"], mark["bits"]) for mark in marks}
    assert drawn == {
        (run["variant"], run["seed"]): (run["train_seconds"], run["bits_per_byte"]) for run in results["runs"]
    }


def test_nothing_is_fetched(written, hostile):
    for folder in (written, hostile):
        page = Page(read(folder))
        for tag, attrs in page.elements:
            for name in ("src", "href", "action", "data", "srcset", "poster", "background"):
                assert (attrs.get(name) or "data:").startswith("data:"), (tag, name, attrs[name])
        assert not [tag for tag, _ in page.elements if tag in ("link", "iframe", "object", "embed", "base", "form")]
        style = read(folder).split("<style>")[1].split("</style>")[0]
        assert "url(" not in style
        assert "@import" not in style
        specs = json.loads(page.scripts[0])
        assert '"url"' not in json.dumps(specs)


def test_the_policy_admits_exactly_the_scripts_of_the_page(written):
    text = read(written)
    page = Page(text)
    policy = next(attrs["content"] for _, attrs in page.elements if attrs.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "unsafe-inline" not in policy.split("style-src")[0]
    hashes = {base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page.scripts[1:]}
    assert set(re.findall(r"'sha256-([^']+)'", policy)) == hashes
    assert len(page.scripts) == 3


def test_one_bundle_and_below_three_megabytes(written):
    text = read(written)
    assert len(text.encode()) < 3_000_000
    assert text.count("window.vegaEmbed=") == 1


def test_hostile_names_are_inert(hostile):
    text = read(hostile)
    page = Page(text)
    assert len(page.scripts) == 3  # figures, library, our own
    assert [tag for tag, attrs in page.elements if tag == "img" and not attrs["src"].startswith("data:")] == []
    assert not [attrs for _, attrs in page.elements if any(name.startswith("on") for name in attrs)]
    assert HOSTILE in page.text
    assert "<img src=x onerror=alert(3)>" in page.text
    assert "<script>alert" not in text
    labels = {row["variant"] for row in json.loads(page.scripts[0])["loss-steps"]["layer"][0]["data"]["values"]}
    assert HOSTILE in labels
    for name in FIGURES:
        assert "<script" not in (hostile / "figures" / f"{name}.svg").read_text()


def test_figures_are_saved(written):
    for name in FIGURES:
        assert (written / "figures" / f"{name}.svg").read_text().startswith("<svg")
        assert (written / "figures" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_light_and_dark_and_narrow(written):
    text = read(written)
    assert "@media (prefers-color-scheme: dark)" in text
    assert 'name="viewport" content="width=device-width, initial-scale=1"' in text
    for tag, attrs in Page(text).elements:
        if tag == "div" and attrs.get("aria-label") == "Results of every variant":
            assert attrs["class"] == "scroll"
            break
    else:
        pytest.fail("the table has no box of its own to scroll in")


def test_a_study_with_nothing_finished_still_has_a_page(tmp_path, make_study):
    results = make_study(tmp_path, labels=("mha", "iha"), seeds=(0,))
    for run in results["runs"]:
        run["status"] = "waiting"
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
        "from headloom.report import write_report\n"
        f"write_report({str(tmp_path)!r})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    assert (tmp_path / "report.html").exists()


@pytest.mark.browser
def test_a_browser_draws_every_figure_without_a_complaint(written, tmp_path):
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        assert "CI" not in os.environ, "CI has to install a browser: .ci/run"
        pytest.skip("no chromium here: the drawn page is checked where there is one")
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
         f"--user-data-dir={tmp_path}", "--virtual-time-budget=8000", "--enable-logging=stderr", "--dump-dom",
         (written / "report.html").as_uri()],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [tag for tag, _ in Page(done.stdout).elements].count("svg") == len(FIGURES)
    assert not [line for line in done.stderr.splitlines() if "CONSOLE" in line]
