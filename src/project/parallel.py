"""Several jobs of a sweep at once: each with GPUs of its own, or an even share of the CPU cores."""

import contextlib
import fcntl
import multiprocessing.process
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig, ListConfig

from project import signals
from project.agent import attended
from project.devices import num_cores, on_gpu
from project.errors import Preempted, UserError

SECONDS_BETWEEN = 0.2  # two looks for a free GPU

T = TypeVar("T")


def num_at_once(launcher: DictConfig) -> int:
    """How many jobs `hydra.launcher` asks to run at once.

    Raises:
        UserError: it asks for something else.
    """
    if launcher.get("_target_", "").endswith("BasicLauncher"):
        return 1
    count = launcher.get("n_jobs")
    if isinstance(count, bool) or not isinstance(count, int) or (count < 1 and count != -1):
        raise UserError(f"hydra.launcher.n_jobs={count}: a number of jobs, or -1 (joblib, basic).")
    return (torch.cuda.device_count() or num_cores()) if count == -1 else count


def run_at_once(jobs: Iterator[T], count: int, run: Callable[[T], int]) -> int:
    """Runs jobs in `count` threads of this process, which share its fork server.

    Args:
        jobs: each is taken when a thread is free.
        run: runs a job; its exit status.

    Returns:
        the status of a job that was asked to stop, after which none has begun; else 0.
    """
    turn, stopped = threading.Lock(), [0]

    def take() -> None:
        while not signals.asked() and not stopped[0]:
            with turn:
                job = next(jobs, None)
            if job is None:
                return
            status = run(job)
            if status >= 128:
                stopped[0] = status

    def work() -> None:
        # Process.start() also polls the children of other threads, and two polls of one child at
        # once can lose its exit status (https://github.com/python/cpython/issues/130895).
        module: Any = multiprocessing.process
        cleanup, module._cleanup = module._cleanup, lambda: None
        try:
            with ThreadPoolExecutor(count) as pool:
                for future in [pool.submit(take) for _ in range(count)]:
                    future.result()
        finally:
            module._cleanup = cleanup

    attended(work)
    return stopped[0] or (Preempted(signals.asked()).status if signals.asked() else 0)


class Share:
    """What each of several jobs gets of the machine.

    Args:
        count: of jobs at once.
        leases: folder of one file a GPU; who holds the lock of one holds the GPU.
    """

    def __init__(self, count: int, leases: Path | None = None) -> None:
        self.count = count
        self.leases = leases or Path(tempfile.gettempdir()) / f"gpu-leases-{os.getuid()}"

    @contextlib.contextmanager
    def __call__(self, trainer: DictConfig, num_ranks: int) -> Iterator[dict[str, str]]:
        """Variables for the ranks of a job; waits for GPUs that are free, holds them meanwhile.

        Raises:
            Preempted: this process was asked to stop.
        """
        if on_gpu(trainer):
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            every = range(torch.cuda.device_count())
            gpus = [name.strip() for name in shown.split(",")] if shown else [*map(str, every)]
            if isinstance(trainer.devices, ListConfig):  # these, by their numbers among all
                with self.leased([gpus[number] for number in trainer.devices], num_ranks):
                    yield {}
            else:
                with self.leased(gpus, num_ranks) as held:
                    yield {"CUDA_VISIBLE_DEVICES": ",".join(held)}
        else:
            threads = max(num_cores() // (self.count * num_ranks), 1)
            yield {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(threads)}

    @contextlib.contextmanager
    def leased(self, gpus: Sequence[str], count: int) -> Iterator[list[str]]:
        """Holds `count` of `gpus`, against all processes of this user that ask in this way.

        The locks go with this process, however it ends. Who waits for several lets nobody else
        take one meanwhile, so that two never wait for each other.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.ExitStack() as alone:
                while not _lock(self.leases / "turn", alone):
                    _wait()
                held: list[str] = []
                while len(held) < count:
                    free = (gpu for gpu in gpus if gpu not in held)
                    gpu = next((g for g in free if _lock(self.leases / g, stack)), None)
                    held += [gpu] if gpu else []
                    if gpu is None:
                        _wait()
            yield sorted(held, key=gpus.index)


def _lock(path: Path, stack: contextlib.ExitStack) -> bool:
    """Locks a file until the end of `stack`, if nobody has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    stack.enter_context(file)
    return True


def _wait() -> None:
    """Before another look: locks of other processes tell nobody when they are free."""
    if signals.asked():
        raise Preempted(signals.asked())
    time.sleep(SECONDS_BETWEEN)
