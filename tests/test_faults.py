"""Kill anything at any moment: nothing is lost, nothing hangs, nothing is left behind.

Each case is a real command with real processes. `pytest -m faults` runs some of each kind,
`pytest -m faults_all -s` all, and prints the table of docs/reliability.md.
"""

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import TINY, outcome

from project.checkpoint import begun

PHASES = ["set-up", "training", "validation", "saving", "test"]
TIMEOUT = 4  # seconds without a sign of life, here
WORDS = [*TINY, "data.num_workers=1", "checkpoint.every_n_steps=3", f"launch.timeout={TIMEOUT}"]

# What happens to a rank: the status of the command, and what its last line says.
TO_A_RANK = {
    "exception": (1, "rank {rank} failed: ArithmeticError: injected"),
    "kill": (1, "rank {rank} "),  # ended with status -9, or: died without a word
    "vanish": (1, "rank {rank} died without a word"),
    "leave": (1, "rank {rank} failed: SystemExit: 3"),
    "sleep": (1, f"rank {{rank}} made no progress for {TIMEOUT} s (launch.timeout), in "),
    "stop": (1, f"rank {{rank}} made no progress for {TIMEOUT} s (launch.timeout), in "),
    "ask": (143, "stopped by SIGTERM"),
}
# What the process gets that the user has started, while a rank is in a phase.
TO_THE_PARENT = {
    signal.SIGTERM: (143, "stopped by SIGTERM"),
    signal.SIGINT: (130, "stopped by SIGINT"),
    signal.SIGUSR1: (143, "stopped by SIGUSR1"),
    signal.SIGHUP: (129, "stopped by SIGHUP"),
    signal.SIGKILL: (-9, ""),
}
SOME = [
    ("exception", 1, "set-up"),
    ("kill", 0, "training"),
    ("kill", 1, "saving"),
    ("kill", 0, "saving"),
    ("vanish", 1, "training"),
    ("vanish", 0, "test"),
    ("leave", 1, "validation"),
    ("sleep", 1, "training"),
    ("sleep", 0, "validation"),
    ("stop", 1, "training"),
    ("ask", 1, "training"),
    (signal.SIGTERM, 0, "validation"),
    (signal.SIGINT, 0, "saving"),
    (signal.SIGUSR1, 0, "training"),
    (signal.SIGHUP, 0, "training"),
    (signal.SIGKILL, 0, "set-up"),
]
HANGS = "sleep", "stop"


def every() -> list[Any]:
    cases = [(how, rank, phase) for how in TO_A_RANK for rank in (0, 1) for phase in PHASES]
    cases += [(number, 0, phase) for number in TO_THE_PARENT for phase in PHASES]
    some = [pytest.mark.faults, pytest.mark.faults_all]
    return [pytest.param(*case, marks=some if case in SOME else some[1]) for case in cases]


class Command:
    """A command whose processes can be told from all others, by a variable that they inherit.

    Attributes:
        folder: of the run.
    """

    def __init__(self, start: Any, folder: Path, *words: str, **variables: str) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        arguments = [*words, *WORDS, f"hydra.run.dir={folder}"]
        self.process: subprocess.Popen[str] = start(*arguments, TOKEN=self.token, **variables)

    def processes(self) -> list[int]:
        """Those that have not ended."""
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if self.token in path.read_text(errors="replace"):
                    found.append(int(path.parts[2]))
            except OSError:  # it ends, or is somebody else's
                continue
        return found

    def await_file(self, *names: str, seconds: float = 60) -> None:
        """Waits for files of the run."""
        until = time.monotonic() + seconds
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < until, names
            time.sleep(0.01)

    def end(self, seconds: float) -> tuple[int, str, float, int]:
        """Waits for its end: status, errors, seconds since now, and how many processes are left."""
        began = time.monotonic()
        _, errors = self.process.communicate(timeout=seconds)
        took = time.monotonic() - began
        until = time.monotonic() + 5
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        return self.process.returncode, errors, took, len(left)


def strike(rank: int, phase: str, how: str) -> list[str]:
    words = {"_target_": "faults.Strike", "rank": rank, "phase": phase, "how": how}
    return [f"+callbacks.strike.{key}={value}" for key, value in words.items()]


@pytest.fixture(scope="module")
def table() -> Iterator[list[list[Any]]]:
    """Rows, printed as Markdown at the end."""
    rows: list[list[Any]] = []
    yield rows
    columns = "what", "rank", "phase", "status", "seconds to the end", "processes left", "remains"
    for row in [columns, ["---"] * len(columns), *rows]:
        print("|", *(f"{cell} |" for cell in row))


@pytest.mark.parametrize(("how", "rank", "phase"), every())
def test_a_fault_ends_the_job_in_time_and_leaves_what_is_whole(
    start, tmp_path, table, how, rank, phase
):
    is_parent = isinstance(how, signal.Signals)
    fault = strike(rank, phase, "hold" if is_parent else how)
    command = Command(start, tmp_path / "run", "python", "train.py", *fault)
    command.await_file("ranks/struck")
    if is_parent:
        command.process.send_signal(how)
    status, errors, seconds, left = command.end(60)
    expected, words = (TO_THE_PARENT if is_parent else TO_A_RANK)[how]
    remains = whole(command.folder)
    name = how.name + " to the parent" if is_parent else how
    table.append([name, rank, phase, status, f"{seconds:.1f}", left, remains])
    assert status == expected, errors
    assert left == 0
    assert seconds < 10 + TIMEOUT * (how in HANGS)
    if how == signal.SIGKILL:
        return
    results = outcome(command.folder)
    reason = f"train.py: {words.format(rank=rank)}"
    assert any(line.startswith(reason) for line in errors.splitlines()), errors
    assert results["status"] == ("failed" if status == 1 else "preempted")
    assert errors.count("Traceback") == (how in ("exception", "leave"))
    if how in HANGS:
        assert f", in {phase} after step " in results["reason"]
        stacks = {path.name for path in command.folder.glob("ranks/*.stacks")}
        assert stacks == {"0-0.stacks", "1-0.stacks"}
        assert "faults.py" in (command.folder / f"ranks/{rank}-0.stacks").read_text()
        assert "faults.py" in errors


def whole(folder: Path) -> str:
    """Each file that a run leaves can be read; what can be gone on with."""
    for path in folder.glob("checkpoints/*.*"):
        assert path.name.startswith(".") or torch.load(path, weights_only=True)
    path = begun(folder)
    return f"step {torch.load(path, weights_only=True)['global_step']}" if path else "config"
