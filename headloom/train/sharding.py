"""FSDP2 over CPU processes. Accelerate has all the parts for it, but does not connect them.

`accelerate launch --use_fsdp --fsdp_version 2` starts the processes on CPUs, and torch's `fully_shard` works with gloo
as with NCCL. But `AcceleratorState` considers FSDP only if its processes run on an accelerator; on CPUs it would train
unsharded replicas without a warning.
"""

from __future__ import annotations

import os

import torch
from accelerate import PartialState
from accelerate.utils import DistributedType

from headloom.core.errors import HeadloomError


def asked_for() -> bool:
    """Whether the launcher was asked for FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"


def allow_cpus() -> None:
    """Make the next Accelerator use FSDP, if FSDP was asked for and the processes run on CPUs.

    AcceleratorState reads the kind of the processes once, to choose between FSDP and replicas. If it is told that they
    run on accelerators, it chooses FSDP. Later code uses the device (cpu) and the backend (gloo) only.

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
