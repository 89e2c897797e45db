"""Loader processes of a rank: how they end, and how their batches come to it."""

import shutil
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from project import signals
from project.processes import end_with_parent

SHARED_MEMORY = Path("/dev/shm")
PREFETCH = 3  # batches of a worker that are on their way at once: torch's 2, and one in use


def worker_options(num_workers: int, num_ranks: int, nbytes: int) -> dict[str, Any]:
    """Options of a DataLoader with worker processes; none without.

    A worker ends with its rank, which answers for it, at once: torch's own look at its parent
    takes 5 s.

    torch hands over batches in shared memory, of which a container may have 64 MiB or less (a bus
    error, or "unable to allocate shared memory"). Where there is too little, they go by a pipe.

    Args:
        num_workers: of a loader; a rank has two loaders at a time.
        num_ranks: on this machine.
        nbytes: of a batch, at most.
    """
    if num_workers == 0:
        return {}
    needed = 2 * num_ranks * num_workers * PREFETCH * nbytes
    is_short = SHARED_MEMORY.exists() and shutil.disk_usage(SHARED_MEMORY).free < needed

    def init(number: int) -> None:
        end_with_parent()
        signals.leave_to_rank()
        if is_short:
            ForkingPickler.register(Tensor, _by_value)

    return {
        "persistent_workers": True,
        # A rank comes from a fork server, and would start another: seconds, and memory.
        "multiprocessing_context": "fork",
        "worker_init_fn": init,
    }


def _by_value(tensor: Tensor) -> tuple[Any, ...]:
    return torch.from_numpy, (tensor.numpy(),)
