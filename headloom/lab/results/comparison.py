"""What a study that has been run gives back: its results, as objects, sentences and tables."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from headloom.core.errors import HeadloomError
from headloom.records.results import RESULTS, Results


@dataclass(frozen=True, repr=False)
class Comparison:
    """A study that has been run: `record` is what was found, `report` the page (None: none was asked).

    It shows itself as its findings in sentences, in a notebook as a table; `frame()` has every number.
    """

    folder: Path
    record: Results
    report: Path | None = None

    @cached_property
    def results(self) -> dict[str, Any]:
        """The content of results.json, as JSON values."""
        return RESULTS.fields(self.record)

    @property
    def headlines(self) -> list[str]:
        """The findings in sentences."""
        return list(self.record.headlines)

    @property
    def failed(self) -> list[dict[str, Any]]:
        """The runs that failed, each with its reason."""
        return [run.to_dict() for run in self.record.runs if run.status == "failed"]

    def frame(self) -> Any:
        """A pandas DataFrame, one row a variant under its label; nested values have names with dots
        (bits_per_byte.mean). pandas must be installed: `pip install pandas`."""
        try:
            import pandas
        except ImportError:
            raise HeadloomError("frame() needs pandas: pip install pandas, or use `results` as it is") from None
        return pandas.json_normalize(self.results["variants"], sep=".").set_index("label")

    def __repr__(self) -> str:
        page = "" if self.report is None else f"\nThe page: {self.report}"
        return "\n".join([self._title, *self.headlines]) + page

    @property
    def _title(self) -> str:
        labels = ", ".join(variant.label for variant in self.record.variants)
        runs = self.record.runs
        return f"Comparison of {labels}: {len(runs) - len(self.failed)} of {len(runs)} runs finished, in {self.folder}"

    def _repr_html_(self) -> str:
        """Label, bits per byte and parameters of each variant, then the findings; all of it escaped."""
        head = "<tr><th>variant</th><th>bits per byte</th><th>sd over seeds</th><th>parameters</th></tr>"
        lines = []
        for variant in self.record.variants:
            quality = variant.bits_per_byte
            cells = (variant.label, _four(quality.mean), _four(quality.sd), f"{variant.parameters:,}")
            lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
        said = "".join(f"<p>{escape(line)}</p>" for line in (self._title, *self.headlines))
        return f"<table>{head}{''.join(lines)}</table>{said}"


def _four(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
