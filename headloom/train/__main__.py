"""`accelerate launch -m headloom.train FILE --out DIR`: one run over several devices; also `python -m headloom.train`.

Exit status: 0 done, 1 the run failed, 2 the call was wrong.
"""

from __future__ import annotations

import argparse
import sys

from headloom.core.errors import HeadloomError, RunError
from headloom.core.heap import keep_freed


def _say(note: str) -> None:
    print(note, file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    """Train the run in a file."""
    parser = argparse.ArgumentParser(prog="python -m headloom.train", description="Train the run in a file.")
    parser.add_argument("file", help="a run's YAML file")
    parser.add_argument("--out", required=True, help="folder of the run")
    parser.add_argument("--track", help="tensorboard, trackio, or wandb (offline)")
    parser.add_argument("--save-model", action="store_true", help="also write model and tokenizer to OUT/model")
    given = parser.parse_args(arguments)
    from headloom.train.file import read_run, train_text
    from headloom.train.run import writes_records

    keep_freed()
    try:
        run, text = read_run(given.file)
        result = train_text(run, text, given.out, on_note=_say, track=given.track, save_model=given.save_model)
    except HeadloomError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, RunError) else 2
    if writes_records():
        print(f"{result.bits_per_byte:.4f} bits per byte after {result.train_seconds:.1f} s: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
