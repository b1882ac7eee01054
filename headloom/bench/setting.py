"""Where and how a benchmark runs: device, type, threads, repetitions; and what the machine itself can multiply."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headloom.bench.asked import DTYPES
from headloom.core.errors import HeadloomError
from headloom.core.machine import ran_on, versions
from headloom.train.config import check_device

if TYPE_CHECKING:
    import torch

SHAPES = {"cpu": ((512, 512, 512), (1024, 1024, 1024), (4096, 1024, 1024)), "cuda": ((4096,) * 3, (8192,) * 3)}
"""(rows, columns, inner) of the products that are tried for the peak."""


def _silent(text: str) -> None:
    pass


def _unkept(rows: Sequence[dict[str, Any]], skipped: Sequence[dict[str, Any]] = ()) -> None:
    pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """How everything of one benchmark is measured.

    Args:
        device: "cpu" or "cuda". dtype: of weights and inputs (None: float32 on CPU, bfloat16 on CUDA).
        threads: of PyTorch's kernels (None: as they are). repeats: timed repetitions, after `warmup` untimed ones.
        seed: of weights and inputs. say: told what is being done.
        keep: given a point's rows, and what was left out there, as soon as they are known.
    Raises:
        HeadloomError: a value that is not allowed, or CUDA where there is none.
    """

    device: str = "cpu"
    dtype: str | None = None
    threads: int | None = None
    repeats: int = 5
    warmup: int = 1
    seed: int = 0
    say: Callable[[str], None] = _silent
    keep: Callable[..., None] = _unkept

    def __post_init__(self) -> None:
        if self.device not in SHAPES:
            raise HeadloomError(f"device must be cpu or cuda, not '{self.device}'")
        if self.dtype is None:
            object.__setattr__(self, "dtype", "bfloat16" if self.device == "cuda" else "float32")
        if self.dtype not in DTYPES:
            raise HeadloomError(f"dtype must be one of {', '.join(DTYPES)}, not '{self.dtype}'")
        for name, least in (("threads", 1), ("repeats", 1), ("warmup", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise HeadloomError(f"{name} must be at least {least}, not {value}")
        check_device(self.device)

    @property
    def type(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype or "")

    @contextmanager
    def active(self) -> Iterator[None]:
        """Threads and random state of the setting inside, the caller's again after it."""
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(self.threads or threads)
        try:
            with torch.random.fork_rng(devices=[0] if self.device == "cuda" else []):
                torch.manual_seed(self.seed)
                yield
        finally:
            torch.set_num_threads(threads)

    def to_dict(self) -> dict[str, Any]:
        """What a result records of it, and of the machine: neither host names nor paths."""
        import torch

        fields = ("device", "dtype", "repeats", "warmup", "seed")
        return {
            **{name: getattr(self, name) for name in fields},
            "threads": self.threads or torch.get_num_threads(),
            "machine": ran_on(torch.cuda.get_device_name() if self.device == "cuda" else None),
            "versions": versions(),
        }


class Peak:
    """The machine's best matrix product so far, in FLOPs a second: the fastest repetition of the fastest shape.

    It is asked again between measurements, so that a slow moment at one of them does not make a mechanism look fast.
    """

    def __init__(self, setting: Setting, shapes: tuple[tuple[int, int, int], ...] | None = None) -> None:
        self.setting, self.shapes = setting, shapes or SHAPES[setting.device]
        self.flops_per_second, self.shape = 0.0, self.shapes[0]

    def measure(self, repeats: int = 3) -> None:
        import torch

        from headloom.bench.speed import interleaved

        calls = {}
        for M, N, K in self.shapes:
            a = torch.randn(M, K, device=self.setting.device).to(self.setting.type)
            b = torch.randn(K, N, device=self.setting.device).to(self.setting.type)
            calls[str((M, N, K))] = (lambda a=a, b=b: a @ b, (M, N, K))
        timings = interleaved(
            {name: call for name, (call, _) in calls.items()}, repeats=repeats, device=self.setting.device
        )
        for name, (_, shape) in calls.items():
            M, N, K = shape
            found = 2 * M * N * K / min(timings[name].samples)
            if found > self.flops_per_second:
                self.flops_per_second, self.shape = found, shape

    def utilisation(self, flops: float | None, seconds: float) -> float | None:
        """The share of the peak that `flops` in `seconds` are."""
        return None if flops is None else flops / seconds / self.flops_per_second

    def to_dict(self) -> dict[str, Any]:
        return {"flops_per_second": self.flops_per_second, "shape": list(self.shape)}
