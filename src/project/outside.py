"""Under an outside torchrun: a store to meet in, a folder for restarts, and a watch."""

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from project import signals
from project.console import say
from project.errors import RankFailed
from project.failure import write_failed, write_report
from project.secret import hidden
from project.watchdog import SECONDS_BETWEEN, Watchdog

if TYPE_CHECKING:
    import torch.distributed as dist


def is_launched() -> bool:
    """Whether torchrun has started this process; what torch asks too, without importing it."""
    return "TORCHELASTIC_RUN_ID" in os.environ


@functools.cache
def store() -> "dist.Store":
    """Where the ranks of an outside torchrun meet; in each attempt without what the last left."""
    with signals.held():
        import torch.distributed as dist
    shared, _, _ = next(iter(dist.rendezvous("env://")))
    return dist.PrefixStore(f"attempt {os.environ['TORCHELASTIC_RESTART_COUNT']}", shared)


def announce(folder: Path) -> None:
    """Rank 0 tells the others, and later attempts, where the run is."""
    if path := _note():
        path.write_text(str(folder))
    store().set("folder", str(folder))


def restarted() -> Path | None:
    """The folder to go on in, if this is not the first attempt under an outside torchrun."""
    path = _note() if is_launched() else None
    if not path or not path.exists() or os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        return None
    return Path(path.read_text())


@contextlib.contextmanager
def watched(folder: Path, timeout: float) -> Iterator[None]:
    """Ends this rank once torchrun is gone, or a rank makes no progress; torchrun ends the others.

    By a thread, which works also while the rank waits in C++.

    Args:
        timeout: see Watchdog.
    """
    rank, attempt = int(os.environ["RANK"]), os.environ["TORCHELASTIC_RESTART_COUNT"]
    first = rank - int(os.environ["LOCAL_RANK"])
    here = range(first, first + int(os.environ["LOCAL_WORLD_SIZE"]))
    watch, parent = Watchdog(folder, int(attempt), timeout, here, own=rank), os.getppid()
    ended = threading.Event()

    def attend() -> None:
        while not ended.wait(SECONDS_BETWEEN):
            try:
                watch.look()
            except RankFailed as error:
                write_report(folder / "ranks" / f"{rank}-{attempt}", str(error), error.traceback)
                write_failed(folder, str(error))
                if watch.speaks:
                    say(hidden(f"{error.traceback}train.py: {error}."), sys.stderr)
                os._exit(1)
            if os.getppid() != parent:
                os._exit(1)

    threading.Thread(target=attend, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _note() -> Path | None:
    """A file for later attempts, beside the error files of all of them: their store is new."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    return Path(path).parents[2] / "run_folder" if path else None
