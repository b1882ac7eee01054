"""FSDP2 over processes on CPUs, which Accelerate has all parts of but does not connect.

`accelerate launch --use_fsdp --fsdp_version 2` on CPUs starts the processes, and torch's `fully_shard` shards over gloo
as it does over NCCL; but `AcceleratorState` looks for FSDP only where its processes are of an accelerator's kind, so
that on CPUs it would train unsharded replicas without a word.
"""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from headloom.core.errors import HeadloomError


def asked_for() -> bool:
    """Whether the launcher was told to shard."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def allow_cpus() -> None:
    """Have the Accelerator that is made next shard, if that was asked for and its processes run on CPUs.

    The kind of the processes is read once, by AcceleratorState, to choose between FSDP and replicas; said to be
    accelerators', it writes FSDP over it. Whatever runs later asks the device (cpu) and the backend (gloo).

    Raises HeadloomError: a single process, FSDP1, or CPUs on a machine with an accelerator.
    """
    if not asked_for():
        return
    state = PartialState()
    if state.distributed_type is DistributedType.NO:
        raise HeadloomError("FSDP was asked for in a single process: give accelerate launch --num_processes 2 or more")
    if state.device.type != "cpu":
        return
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise HeadloomError("on CPUs, FSDP of version 2 only: give accelerate launch --fsdp_version 2")
    if torch.accelerator.is_available():  # fully_shard's default mesh would be of its kind
        raise HeadloomError(
            "FSDP was asked for on CPUs of a machine with an accelerator: leave out device 'cpu', "
            "or launch with --multi_gpu for plain data-parallel processes"
        )
    if state.distributed_type is DistributedType.MULTI_CPU:
        state.distributed_type = DistributedType.MULTI_GPU
