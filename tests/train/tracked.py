"""What tests/train/test_tracking.py runs in a process of its own: `tracked.py RUN.yaml FOLDER TRACKER...`.

Of every tracker two runs, TRACKER/first by the command line and TRACKER/failing in Python, all in one process.
"""

from __future__ import annotations

import sys
from pathlib import Path

from headloom.cli.app import app
from headloom.core.errors import HeadloomError
from headloom.train.file import read_run, train_text


def main(file: str, folder: Path, trackers: list[str]) -> None:
    run, text = read_run(file)
    hot = run.model_copy(update={"learning_rate": 1e30})
    for track in trackers:
        arguments = ["train", file, "--track", track, "--out", str(folder / track / "first"), "--json"]
        assert not app(arguments, standalone_mode=False)
        try:
            train_text(hot, text, folder / track / "failing", track=track)
        except HeadloomError as error:
            print(f"{track}: {error}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
