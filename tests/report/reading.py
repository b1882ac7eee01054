"""A report page as a browser reads it, and what is in it."""

import json
from html.parser import HTMLParser

HOSTILE = "<script>alert(1)</script>"
FIGURES = ("difference", "quality-time", "loss-steps", "loss-tokens", "loss-seconds")
AXES = ("steps", "tokens", "flops", "seconds")
ALL = (*(f"held-out-{axis}" for axis in AXES), "difference", "quality-time", "quality-parameters", "quality-cache",
       "learning-rates", "mixes-1", *(f"loss-{axis}" for axis in AXES))  # fmt: skip


class Page(HTMLParser):
    """The page as a browser reads it: elements, texts, and the contents of its scripts."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.elements, self.scripts, self.cells, self.text = [], [], [], ""
        self._open = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in ("wbr", "img", "meta", "input"):
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


def read(folder):
    return (folder / "report.html").read_text(encoding="utf-8")


def drawings(page):
    """What the page's script draws from: (panels by name, data sets by name)."""
    sections = json.loads(page.scripts[0])["sections"]
    panels = {name: spec for section in sections for name, spec in section["panels"].items()}
    return panels, {name: rows for section in sections for name, rows in section["datasets"].items()}
