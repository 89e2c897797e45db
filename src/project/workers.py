"""Loader processes of a rank: how they end, and how their batches come to it."""

import shutil
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from project import signals
from project.processes import end_with_parent

SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 3  # batches of a worker that are on their way at once: torch's 2, and one in use


def worker_init(num_workers: int, nbytes: int) -> Callable[[int], None]:
    """A `worker_init_fn` of DataLoader: a worker ends with its rank, which answers for it.

    At once: torch's own look at its parent takes 5 s.

    torch hands over batches in shared memory, of which a container may have 64 MiB or less (a bus
    error, or "unable to allocate shared memory"). Where there is too little, they go by a pipe.

    Args:
        num_workers: of all loaders of the run on this machine.
        nbytes: of a batch, at most.
    """
    needed = num_workers * PREFETCH * nbytes
    is_short = SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).free < needed

    def init(number: int) -> None:
        end_with_parent()
        signals.leave_to_rank()
        if is_short:
            ForkingPickler.register(Tensor, _by_value)

    return init


def _by_value(tensor: Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.numpy(),)
