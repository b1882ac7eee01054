"""What each process of tests/train/test_distributed.py runs: a run, and the same run broken off and gone on with.

    accelerate launch --use_fsdp --fsdp_version 2 ... tests/train/sharded.py RUN.yaml FOLDER

FOLDER gets whole/ and broken/ (both runs), and shards-0.json, shards-1.json: every parameter's whole and local shape,
and the local shapes of its two AdamW moments, as each process saw them while it trained.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import ClassVar

from torch.distributed.tensor import DTensor

from headloom.train import checkpoints, trainer
from headloom.train.file import read_run, train_text

STOP = 4  # the last whole checkpoint is then that of step 3, after an evaluation


class Broken(Exception):
    pass


class Watching(trainer.Recorder):
    """A Recorder that looks at the optimizer after a step, and breaks off where it is told to."""

    shards: ClassVar[dict[str, list[list[int]]]] = {}
    stop: int | None = None

    def on_step_end(self, args, state, control, optimizer=None, model=None, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        for name, parameter in model.named_parameters():
            moments = optimizer.state[parameter]
            locals_ = [parameter, moments["exp_avg"], moments["exp_avg_sq"]]
            assert all(isinstance(tensor, DTensor) for tensor in locals_), name
            self.shards[name] = [list(parameter.shape), *(list(tensor.to_local().shape) for tensor in locals_)]

    def on_log(self, args, state, control, logs=None, **kwargs):
        super().on_log(args, state, control, logs=logs, **kwargs)
        if state.global_step == self.stop:
            raise Broken


def main(file: str, folder: Path) -> None:
    import headloom.train.run

    headloom.train.run.Recorder = Watching
    run, text = read_run(file)
    train_text(run, text, folder / "whole", save_model=True)
    (folder / f"shards-{os.environ['RANK']}.json").write_text(json.dumps(Watching.shards))
    Watching.stop = STOP
    try:
        train_text(run, text, folder / "broken", checkpoint_seconds=0)
    except Broken:
        Watching.stop = None
    left = checkpoints.latest(folder / "broken")
    assert left is not None and left.step == STOP - 1 and left.sharded
    train_text(run, text, folder / "broken", checkpoint_seconds=0)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
