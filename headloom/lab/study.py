"""`hl.Study`: a study that can be run. What can be written in one stands in headloom.lab.spec.study."""

from __future__ import annotations

from pathlib import Path

from headloom.lab.compare import run_study
from headloom.lab.results.comparison import Comparison
from headloom.lab.run.progress import Progress
from headloom.lab.spec.study import WrittenStudy


class Study(WrittenStudy):
    """A study: `Study.from_yaml(path).run()`, or of Python values, `Study(variants=["mha", "iha"]).run()`.

    Its keys are those of `headloom.lab.spec.study.WrittenStudy`.
    """

    def run(
        self, out: str | Path | None = None, *, progress: Progress | bool | None = None, report: bool = True
    ) -> Comparison:
        """Run it, or what is left of it, in the folder `out` (None: the study's name here, or the next free number).

        Args:
            progress: None shows it on stderr, False does not; or one of your own, which is told what happens.
            report: also write report.html and figures/.

        Raises:
            HeadloomError: the study is wrong; nothing was trained.
            headloom.lab.run.runner.Interrupted: Ctrl-C; what was finished is kept.
        """
        return run_study(self, out=out, progress=progress, report=report)
