"""Who failed first, and why: what the ranks of a run leave in `ranks/`."""

import json
import os
import signal
import time
import traceback
from pathlib import Path
from typing import Any

from project import heartbeat
from project.errors import Preempted, RankFailed, UserError
from project.files import write_json
from project.folder import read_results
from project.processes import ranks_of
from project.secret import hidden
from project.watchdog import died


def furthest_step(folder: Path) -> int:
    """The step that the ranks of the latest attempt have reached."""
    return max((heartbeat.read(path).step for path in folder.glob("ranks/*.beat")), default=0)


def record_failure(
    report: Path, train_log: Path | None, error: BaseException, mistake: str | None
) -> None:
    """Writes a rank's failure to its report, the traceback to its log.

    Not to the console, where the first failure is shown, and only that one.

    Args:
        mistake: of the user, if that is behind it: then the console shows no traceback.
    """
    rank, trace = int(report.name.split("-")[0]), _printable(traceback.format_exc())
    first_line = text_of(error).partition("\n")[0].rstrip(" .")
    summary = mistake or f"{type(error).__name__}: {first_line}".rstrip(": ")
    if dead := dead_ranks(report.parents[1]):
        write_report(report, died(dead[0]))
    else:
        reason = f"rank {rank} failed: {summary}"
        write_report(report, mistake or reason, trace, is_mistake=bool(mistake))
    with (train_log or report.with_suffix(".log")).open("a") as file:
        file.write(hidden(f"{summary}\n" if isinstance(error, UserError) else trace))


def text_of(error: BaseException) -> str:
    """The message of an error, also of one that fails to say it."""
    try:
        return _printable(str(error))
    except Exception as wrong:  # of somebody's __str__
        return f"(its message cannot be shown: {type(wrong).__name__})"


def _printable(text: str) -> str:
    """Without surrogates, as in names of files that are no UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def write_report(report: Path, reason: str, trace: str = "", **more: Any) -> None:
    """Leaves what ended a rank, or what it has seen to end another.

    Args:
        report: path, without its suffix.
        more: is_mistake, or the signal that asked it to stop.
    """
    content = {"time": time.time(), "reason": hidden(reason), "traceback": hidden(trace)}
    write_json(report.with_suffix(".json"), content | more)


def write_preempted(folder: Path, stopped: Preempted) -> None:
    """Leaves word in `results.json` that a run was asked to stop; `resume` goes on."""
    note(folder, str(stopped))
    results = {"status": "preempted", "reason": str(stopped), "signal": stopped.number}
    write_json(folder / "results.json", results)


def note(folder: Path, text: str) -> None:
    """Adds a line to `train.log` of what no rank can say."""
    with (folder / "train.log").open("a") as file:
        file.write(hidden(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}\n"))


def write_failed(folder: Path, reason: str) -> None:
    """Leaves a completed result alone: what ends a rank after that takes nothing away."""
    note(folder, reason)
    if read_results(folder).get("status") != "complete":
        write_json(folder / "results.json", {"status": "failed", "reason": hidden(reason)})


def first_report(folder: Path) -> Exception | Preempted | None:
    """What ended the latest attempt, by its earliest report: the other ranks followed that one.

    Returns:
        the error to raise, None if no rank has reported.
    """
    reports = [json.loads(path.read_text()) for path in folder.glob("ranks/*.json")]
    report = min(reports, key=lambda report: report["time"], default=None)
    if report is None:
        return None
    if "signal" in report:
        name = signal.Signals(report["signal"]).name
        return Preempted(report["signal"], report["reason"].removeprefix(f"stopped by {name}"))
    if report.get("is_mistake"):
        return UserError(report["reason"])
    return RankFailed(report["reason"], report["traceback"])


def dead_ranks(folder: Path) -> list[int]:
    """Ranks that died without a word, as one of the others (RANK) finds them."""
    ranks = ranks_of(folder, but=int(os.environ["RANK"]))
    return [rank.number for rank in ranks if not rank.is_alive]


def check_progress(folder: Path, failure: BaseException | None) -> None:
    """Comes before another attempt.

    Raises:
        UserError: it would end in the same mistake.
        RankFailed: two attempts have failed at the same step, with a traceback. Ranks may be killed
            as often as one likes.
    """
    path, step = folder / "ranks" / "failed_at", str(furthest_step(folder))
    if isinstance(failure, UserError):
        raise failure
    trace = getattr(failure, "traceback", "")
    if not trace:
        return
    if path.exists() and path.read_text() == step:
        raise RankFailed(f"{failure}; so did the attempt before, at the same step", trace)
    path.write_text(step)


def next_attempt(folder: Path) -> int:
    """The first number that no attempt in this folder has."""
    numbers = [path.stem.split("-")[1] for path in folder.glob("ranks/*-*.log")]
    return max(map(int, numbers), default=-1) + 1


def clear(folder: Path) -> None:
    """Removes what an earlier attempt has left: success and failure are what the next writes."""
    parts = ".*-*", "*/.*-*"  # of files that were being written
    _remove(folder, "results.json", "ranks/*.json", "ranks/*.pid", "ranks/*.beat", *parts)


def tidy(folder: Path) -> None:
    """Removes what only another attempt would have asked for."""
    _remove(folder, "ranks/*.beat", "ranks/failed_at")


def _remove(folder: Path, *patterns: str) -> None:
    for path in (path for pattern in patterns for path in folder.glob(pattern)):
        path.unlink(missing_ok=True)
