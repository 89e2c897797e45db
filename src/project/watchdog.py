"""Finds ranks that make no progress, and ranks that ended without a word."""

import contextlib
import os
import signal
import time
from pathlib import Path

from project import heartbeat
from project.errors import RankFailed
from project.heartbeat import Beat
from project.processes import Rank, ranks_of, send_to

SECONDS_BETWEEN = 0.2  # two looks
DEATH = 2.0  # seconds that a silent death may take to be noticed by others, who know more
SLOW = 60.0  # seconds that processes may take to begin (imports), and to be gone at the end
MOST_FRAMES = 12  # that are shown
# Files of torch whose functions wait for other ranks.
WAITING = "torch/distributed/", "torch/autograd/graph.py", "torch/nn/parallel/distributed.py"


class Watchdog:
    """Looks after the ranks of one attempt, from a process that is not stuck with them.

    Args:
        folder: of the run.
        attempt: in the names of the files for stacks.
        timeout: seconds without a sign of life, `launch.timeout`.
        here: the ranks of this machine; those of others have watches of their own.
        own: the rank that watches the others, if it is one.

    Attributes:
        speaks: whether, of the ranks that have found another at fault, this one is to say so.
    """

    def __init__(
        self, folder: Path, attempt: int, timeout: float, here: range, own: int | None = None
    ) -> None:
        self.folder, self.attempt, self.timeout = folder, attempt, timeout
        self.here, self.own, self.speaks = here, own, False
        self._begun: set[int] = set()
        self._pids: set[int] = set()
        self._ended = 0.0
        self._beats: dict[int, Beat] = {}
        self._since: dict[int, float] = {}
        self._dead_since: dict[int, float] = {}
        # Seconds of looking: while this process was stopped itself (Ctrl-Z), nobody was late.
        self._clock, self._looked = 0.0, time.monotonic()

    def look(self) -> None:
        """Costs next to nothing if the last look was just now.

        Raises:
            RankFailed: the rank that is at fault, and in `traceback` where it is.
        """
        now = time.monotonic()
        if now - self._looked < SECONDS_BETWEEN:
            return
        self._clock += min(now - self._looked, 1.0)
        self._looked = now
        ranks = [r for r in ranks_of(self.folder, but=self.own) if r.number in self.here]
        if self.own is not None and (self.folder / f"ranks/{self.own}.beat").exists():
            ranks.append(Rank(self.own, os.getpid(), True))
        for rank in ranks:
            beat = heartbeat.read(self.folder / "ranks" / f"{rank.number}.beat")
            if self._beats.get(rank.number) != beat:
                self._beats[rank.number], self._since[rank.number] = beat, self._clock
        if self.own is None:
            self._check_ends(ranks)
        dead = {rank.number for rank in ranks if not rank.is_alive}
        self._dead_since = {n: self._dead_since.get(n, self._clock) for n in dead}
        for number, since in self._dead_since.items():
            if self._clock - since > DEATH:
                raise RankFailed(died(number))
        if late := self._late(ranks):
            raise self._at_fault(late, ranks)

    def _late(self, ranks: list[Rank]) -> list[Rank]:
        return [rank for rank in ranks if self._clock - self._since[rank.number] >= self.timeout]

    def _check_ends(self, ranks: list[Rank]) -> None:
        """Finds processes that do not come to be ranks, and ends those that were and do not go.

        The latter wait for a thread of the user's, say; their work is done.
        """
        folder = self.folder / "ranks"
        self._begun |= {n for n in self.here if (folder / f"{n}.beat").exists()}
        missing = sorted({*self.here} - self._begun)
        is_waited_for = bool(missing) and self._clock > self.timeout + SLOW
        if missing and (is_waited_for or self._late(ranks)):
            raise RankFailed(f"rank {missing[0]} has not begun in {self._clock:.0f} s")
        self._pids |= {rank.pid for rank in ranks if rank.pid}
        if ranks or missing:
            self._ended = self._clock
        elif self._clock - self._ended > SLOW:
            send_to([pid for pid in self._pids if _is_rank(pid)], signal.SIGKILL)

    def _at_fault(self, late: list[Rank], ranks: list[Rank]) -> RankFailed:
        """Names one rank: those that wait in a collective are late because of another.

        It is one that is stopped, or else one that does not wait, or was the first to be late.
        """
        stopped = [rank for rank in ranks if _is_stopped(rank.pid)]
        running = [rank for rank in ranks if rank.pid and rank not in stopped]
        self.speaks = self.own == min((rank.number for rank in running), default=None)
        files = self._write_stacks(running, stopped)
        busy = [[r for r in group if not self._waits(r)] for group in (late, ranks)]
        suspects = next(filter(None, [stopped, *busy, late]))
        rank = min(suspects, key=lambda rank: self._beats[rank.number].time)
        beat, own = self._beats[rank.number], self._stacks(rank.number)
        is_stopped = " (stopped by a signal)" if rank in stopped else ""
        where = f"; stacks: ranks/*-{self.attempt}.stacks" if files else ""
        frames = _main_thread(own).splitlines()[1:] if own in files else []
        heading = f"rank {rank.number}, innermost call first:"
        more = ["  ..."] if len(frames) > MOST_FRAMES else []
        return RankFailed(
            f"rank {rank.number} made no progress for {self.timeout:g} s (launch.timeout), in "
            f"{beat.doing} after step {beat.step}{is_stopped}{where}",
            "\n".join([heading, *frames[:MOST_FRAMES], *more, ""]) if frames else "",
        )

    def _waits(self, rank: Rank) -> bool:
        """Whether a rank is in a collective, or in a backward that ends in one."""
        path = self._stacks(rank.number)
        innermost = _main_thread(path).split("\n")[1:2] if path.exists() else []
        return any(name in line for line in innermost for name in WAITING)

    def _write_stacks(self, running: list[Rank], stopped: list[Rank]) -> list[Path]:
        """Lets ranks of this machine write their stacks, after their loader workers; the files.

        Those that are stopped last, once no other is there any more with whom to go on.
        """
        for rank in running:
            send_to(_children(rank.pid), signal.SIGUSR2)
        self._await_stacks(running, seconds=0.5)
        send_to([rank.pid for rank in running], signal.SIGUSR2)
        found = self._await_stacks(running)
        if stopped and self.own is None:
            send_to([rank.pid for rank in running], signal.SIGKILL)
            for number in signal.SIGUSR2, signal.SIGCONT:
                send_to([rank.pid for rank in stopped], number)
            found += self._await_stacks(stopped)
        send_to([rank.pid for rank in stopped], signal.SIGKILL)  # SIGTERM would not reach them
        return found

    def _await_stacks(self, ranks: list[Rank], seconds: float = 2.0) -> list[Path]:
        paths = [self._stacks(rank.number) for rank in ranks]
        before, until = [-1], time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(0.1)
            sizes = [_size(path) for path in paths]
            if sizes == before and all(sizes):
                break
            before = sizes
        return [path for path in paths if _size(path)]

    def _stacks(self, number: int) -> Path:
        return self.folder / "ranks" / f"{number}-{self.attempt}.stacks"


def died(number: int) -> str:
    """The reason of a rank that has left none."""
    return f"rank {number} died without a word (killed, or os._exit)"


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T")
    return False


def _is_rank(pid: int) -> bool:
    """Whether a number is not somebody else's by now."""
    with contextlib.suppress(OSError):
        return b"forkserver" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        paths = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for path in paths for child in path.read_text().split()]
    return []


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _main_thread(path: Path) -> str:
    """The stack of the oldest thread, which faulthandler writes last."""
    return path.read_text().rstrip().rpartition("\n\n")[2] + "\n"
