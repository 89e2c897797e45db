"""Who is alive, who failed first, and why: what the ranks of a run leave in `ranks/`."""

import contextlib
import fcntl
import json
import mmap
import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path

from project.errors import Preempted, RankFailed, UserError
from project.files import write_json
from project.folder import read_results
from project.secret import hidden


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


class StepFile:
    """Shows the optimizer step that a rank has reached, also after it was killed."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 8)

    def write(self, step: int) -> None:
        """Costs no system call."""
        self._bytes[:] = step.to_bytes(8, "little")


def furthest_step(folder: Path) -> int | None:
    """The step that the ranks of the latest attempt have reached, None before training."""
    steps = [path.read_bytes() for path in folder.glob("ranks/*.step")]
    return max((int.from_bytes(step, "little") for step in steps), default=None)


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
    trace, summary = hidden(trace), hidden(summary)
    content = {"time": time.time(), "error": summary, "traceback": None if mistake else trace}
    content["dead"] = dead_ranks(report.parent)
    write_json(report.with_suffix(".json"), content)
    with (train_log or report.with_suffix(".log")).open("a") as file:
        file.write(f"{summary}\n" if isinstance(error, UserError) else trace)


def write_preempted(folder: Path, stopped: Preempted) -> None:
    """Leaves word in `results.json` that a run was asked to stop; `resume` goes on."""
    results = {"status": "preempted", "reason": str(stopped), "signal": stopped.number}
    write_json(folder / "results.json", results)


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


def preempted(folder: Path) -> Preempted | None:
    """The request that stopped all ranks of the latest attempt, None if something else did."""
    results = read_results(folder)
    if results.get("status") != "preempted" or any(folder.glob("ranks/*.json")):
        return None
    name = signal.Signals(results["signal"]).name
    return Preempted(results["signal"], results["reason"].removeprefix(f"stopped by {name}"))


def check_progress(folder: Path, failure: Exception | None) -> None:
    """Comes before another attempt.

    Raises:
        UserError: it would end in the same mistake.
        RankFailed: two attempts have failed at the same step.
    """
    path, step = folder / "ranks" / "failed_at", str(furthest_step(folder))
    if isinstance(failure, UserError):
        raise failure
    if path.exists() and path.read_text() == step:
        trace = getattr(failure, "traceback", "")
        raise RankFailed(f"{failure}; so did the attempt before, at the same step", trace)
    path.write_text(step)


def next_attempt(folder: Path) -> int:
    """The first number that no attempt in this folder has."""
    numbers = [path.stem.split("-")[1] for path in folder.glob("ranks/*-*.log")]
    return max(map(int, numbers), default=-1) + 1


def clear(folder: Path) -> None:
    """Removes what an earlier attempt has left: success and failure are what the next writes."""
    parts = ".*-*", "*/.*-*"  # of files that were being written
    _remove(folder, "results.json", "ranks/*.json", "ranks/*.pid", "ranks/*.step", *parts)


def tidy(folder: Path) -> None:
    """Removes what only another attempt would have asked for."""
    _remove(folder, "ranks/*.step", "ranks/failed_at")


def _remove(folder: Path, *patterns: str) -> None:
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        path.unlink(missing_ok=True)


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
