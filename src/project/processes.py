"""The processes of a run: which ranks are alive; signals to them; none outlives its job."""

import contextlib
import fcntl
import multiprocessing.forkserver
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple


class Rank(NamedTuple):
    """A rank that has begun and not ended in order.

    Args:
        number: RANK.
        pid: process id, 0 if the rank is just about to write it.
        is_alive: false if it died without a word.
    """

    number: int
    pid: int
    is_alive: bool


def start_fork_server() -> None:
    """Starts the process that ranks are forked from; it imports what they need."""
    multiprocessing.forkserver.set_forkserver_preload(["project.preload"])
    multiprocessing.forkserver.ensure_running()


def end_fork_server() -> None:
    """It would finish its imports first, and keep open the pipes that it was given."""
    server: Any = multiprocessing.forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        os.kill(server._forkserver_pid, signal.SIGKILL)


def end_with_parent() -> None:
    """From now on this process ends when its parent does, even by SIGKILL.

    A rank has two: the fork server, of whose end the kernel tells (by SIGINT, had torch its way,
    which is a request to stop here), and the process that launches, of whose end a pipe tells.
    """
    from torch.multiprocessing import _prctl_pr_set_pdeathsig  # type: ignore[attr-defined]

    _prctl_pr_set_pdeathsig(signal.SIGKILL)
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()


def end_workers() -> None:
    """Ends loader workers at once; asked by SIGTERM, they would leave the answer to their rank."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's raises for each that is killed
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
            child.join()
    signal.signal(signal.SIGCHLD, before)


@contextlib.contextmanager
def pid_file(path: Path) -> Iterator[None]:
    """Shows who is alive: the file is there and locked from the start of a rank to its end."""
    with path.open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def ranks_of(folder: Path, but: int | None = None) -> list[Rank]:
    """The ranks that work in a run's folder, or died there without a word.

    The file of a dead one is still there, its lock went with the process. The kernel closes a
    dying process's files in the order of their opening, so that the lock is free before the
    sockets break from which the other ranks learn of a death.

    Args:
        but: the rank that asks. Its file is not even opened: closing it would give up the lock.
    """
    found = []
    for path in folder.glob("ranks/*.pid"):
        if path.stem == str(but):
            continue
        with contextlib.suppress(FileNotFoundError), path.open("r+") as file:
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_alive = False
            except BlockingIOError:
                is_alive = True
            if path.exists():  # else it ended in order just now
                pid = file.read().strip()
                found.append(Rank(int(path.stem), int(pid) if pid.isdecimal() else 0, is_alive))
    return sorted(found)


def send(number: int, *folders: Path, told: set[int] | None = None) -> None:
    """Sends a signal to all ranks that are alive.

    Args:
        told: process ids that have got it already; grows.
    """
    told = set() if told is None else told
    for rank in [rank for folder in folders for rank in ranks_of(folder)]:
        if rank.is_alive and rank.pid and rank.pid not in told:
            told.add(rank.pid)
            send_to([rank.pid], number)


def send_to(pids: Iterable[int], number: int) -> None:
    """Sends a signal to processes, some of which may be gone."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def sweep_up(folder: Path, seconds: float = 5.0) -> None:
    """Ends all ranks that are left in a folder, and waits until they are gone.

    The agent takes them for dead once their fork server is (CPython's Popen of "forkserver").
    """
    until = time.monotonic() + seconds
    while any(rank.is_alive for rank in ranks_of(folder)) and time.monotonic() < until:
        send(signal.SIGKILL, folder)
        time.sleep(0.01)
    empty = (path for path in folder.glob("ranks/*.stacks") if not path.stat().st_size)
    for path in [*folder.glob("ranks/*.pid"), *empty]:
        path.unlink(missing_ok=True)
