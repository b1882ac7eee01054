"""The machine that something ran on, as records hold it."""

from __future__ import annotations

from typing import Any

from pydantic import SerializerFunctionWrapHandler, model_serializer

from headloom.records.files import Record


class Machine(Record):
    """Neither host name nor paths. What is None is not known, or was not used, and is not written.

    Attributes:
        processor, architecture, system: in the words of the operating system. cores: that the process might use.
        memory_gib: of the machine.
        freed_memory: "kept" or "returned", what became of memory that the process freed.
        processes: how many shared the work. sharding: "FSDP" where they shared the weights too.
        accelerator: the name of the GPU. threads: of every run of a study.
    """

    processor: str
    architecture: str
    cores: int
    memory_gib: float
    system: str
    freed_memory: str | None = None
    processes: int | None = None
    sharding: str | None = None
    accelerator: str | None = None
    threads: int | None = None

    @model_serializer(mode="wrap")
    def _known(self, usual: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in usual(self).items() if value is not None}

    @property
    def name(self) -> str:
        """Of the part that did the work: the accelerator, or else the processor."""
        return self.accelerator or self.processor
