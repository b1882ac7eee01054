"""One run: a resolved configuration, Hugging Face's Trainer, and a folder of records.

`train` is imported when first used.
"""

from typing import TYPE_CHECKING, Any

from headloom.records.runs import RunResult
from headloom.train.config import LayerSpec, RunConfig

if TYPE_CHECKING:
    from headloom.train.run import train

__all__ = ["LayerSpec", "RunConfig", "RunResult", "train"]


def __getattr__(name: str) -> Any:
    if name == "train":  # the Trainer takes seconds to import; configurations and results need none of it
        from headloom.train.run import train

        return train
    raise AttributeError(f"module 'headloom.train' has no attribute {name!r}")
