"""Who is alive, who failed first, and why: what the ranks of a run leave in `ranks/`."""

import contextlib
import fcntl
import json
import multiprocessing
import os
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

from project.errors import RankFailed, UserError
from project.files import write_json


def end_with_parent() -> None:
    """From now on this process ends when its parent does, even by SIGKILL."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel
        threading.Thread(target=lambda: (wait([sentinel]), os._exit(1)), daemon=True).start()


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


def record_failure(
    report: Path, train_log: Path | None, error: BaseException, mistake: str | None
) -> None:
    """Writes a rank's failure to its report, the traceback to its log.

    Not to the console, where the first failure is shown, and only that one.

    Args:
        mistake: of the user, if that is behind it: then the console shows no traceback.
    """
    trace = traceback.format_exc()
    first_line = str(error).partition("\n")[0].rstrip(".")
    summary = mistake or f"{type(error).__name__}: {first_line}"
    content = {"time": time.time(), "error": summary, "traceback": None if mistake else trace}
    content["dead"] = dead_ranks(report.parent)
    write_json(report.with_suffix(".json"), content)
    with (train_log or report.with_suffix(".log")).open("a") as file:
        file.write(f"{summary}\n" if isinstance(error, UserError) else trace)


def first_failure(folder: Path) -> Exception | None:
    """What ended a job: the first report of a rank, or the silent death that it tells of.

    Returns:
        the error to raise, None if no rank has reported.
    """
    reports = {path: json.loads(path.read_text()) for path in folder.glob("ranks/*.json")}
    if not reports:
        return None
    path, report = min(reports.items(), key=lambda item: item[1]["time"])
    if report["dead"]:
        return RankFailed(f"rank {report['dead'][0]} died without a word (killed, or os._exit)")
    if report["traceback"] is None:
        return UserError(report["error"])
    rank = path.name.split("-")[0]
    return RankFailed(f"rank {rank} failed: {report['error']}", report["traceback"])


def dead_ranks(ranks: Path) -> list[int]:
    """Ranks that died without a word: their file is still there, the lock went with the process.

    The kernel closes a dying process's files in the order of their opening, so that the lock is
    free before the sockets break from which the other ranks learn of a death.
    """
    own = ranks / f"{os.environ['RANK']}.pid"  # not even opened: closing it would give up the lock
    dead = []
    for path in {*ranks.glob("*.pid")} - {own}:
        with contextlib.suppress(BlockingIOError, FileNotFoundError), path.open("r+b") as file:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists():  # else it ended in order just now
                dead.append(int(path.stem))
    return sorted(dead)
