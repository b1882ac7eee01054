"""The page in a real browser: drawn, silent, and as wide as its window."""

import json
import os
import shutil
import subprocess

import pytest
from report.reading import ALL, FIGURES, Page


@pytest.fixture
def browse(tmp_path):
    """A function: a page -> (its elements once drawn, what the browser had to say)."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        assert "CI" not in os.environ, "CI has to install a browser: .ci/run"
        pytest.skip("no chromium here: the drawn page is checked where there is one")

    def look(page, *options):
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
             f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000", "--enable-logging=stderr", *options,
             "--dump-dom", page.as_uri()],
            capture_output=True, text=True, timeout=900, check=True,
        )  # fmt: skip
        return Page(done.stdout), [line for line in done.stderr.splitlines() if "CONSOLE" in line]

    return look


@pytest.mark.browser
def test_a_browser_draws_every_figure_without_a_complaint(written, browse):
    page, said = browse(written / "report.html")
    assert [tag for tag, _ in page.elements].count("svg") == len(FIGURES)
    assert said == []


@pytest.mark.browser
def test_a_browser_draws_a_whole_study_and_no_hostile_name_runs(whole, browse, tmp_path):
    """In the dark and on a telephone's width; every alert() would have stopped or changed the page."""
    page, said = browse(whole / "report.html", "--blink-settings=preferredColorScheme=0", "--window-size=500,900")
    drawn = [tag for tag, attrs in page.elements if tag == "svg" and attrs.get("class") == "marks"]
    canvases = [attrs for tag, attrs in page.elements if tag == "canvas"]
    assert len(drawn) == len(ALL) - 1
    assert len(canvases) == 1
    assert int(canvases[0]["width"]) > 300
    assert len(page.scripts) == 3
    assert not [attrs for tag, attrs in page.elements if tag == "img" and not attrs["src"].startswith("data:")]
    assert said == []


PHONE = """<body><iframe id="f" style="width:390px;height:800px"></iframe><p id="said"></p><script>
const frame = document.getElementById("f");
frame.onload = () => setTimeout(() => {
  const page = frame.contentDocument, seen = {};
  const shown = () => [...page.querySelectorAll(".tabs:has(#tab-loss-steps) > .panel")]
    .filter((panel) => frame.contentWindow.getComputedStyle(panel).visibility === "visible")
    .map((panel) => panel.querySelector(".figure").id);
  for (const name of ["loss-steps", "loss-tokens", "loss-flops", "loss-seconds"]) {
    page.querySelector(`label[for=tab-${name}]`).click();
    seen[name] = shown();
  }
  const root = page.documentElement;
  seen.width = [root.scrollWidth, root.clientWidth];
  seen.drawn = Math.min(...[...page.querySelectorAll("svg.marks, canvas")].map((e) => e.getBoundingClientRect().width));
  document.getElementById("said").textContent = JSON.stringify(seen);
}, 9000);
frame.src = "PAGE";
</script>"""


@pytest.mark.browser
def test_a_telephone_switches_the_axis_and_scrolls_down_only(whole, browse, tmp_path):
    (tmp_path / "phone.html").write_text(PHONE.replace("PAGE", (whole / "report.html").as_uri()))
    page, said = browse(tmp_path / "phone.html", "--allow-file-access-from-files")
    assert said == []
    seen = json.loads(page.text.strip())
    for name in ("loss-steps", "loss-tokens", "loss-flops", "loss-seconds"):
        assert seen[name] == [f"figure-{name}"]
    assert seen["width"][0] <= seen["width"][1] <= 390
    assert seen["drawn"] > 250
