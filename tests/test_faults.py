"""Kill anything at any moment: nothing is lost, nothing hangs, nothing is left behind.

Each case is a real command with real processes. `pytest -m faults` runs some of each kind,
`pytest -m faults_all -s` all, and prints a table.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import termios
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch.distributed.run import get_args_parser

from conftest import REPOSITORY, TINY, TRAIN, environment, outcome
from laws import differences

from project.checkpoint import begun

PHASES = ["set-up", "training", "validation", "saving", "test"]
TIMEOUT = 6  # seconds without a sign of life, here
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

    Args:
        folder: of the run.
        words: beside those of all.
        program: what runs train.py.
        variables: of its environment, on top; None for none.
        options: of Popen.
    """

    def __init__(
        self,
        folder: Path,
        words: Sequence[str] = (),
        program: Sequence[str] = (sys.executable, TRAIN),
        variables: Mapping[str, str | None] = MappingProxyType({}),
        **options: Any,
    ) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        merged = {**environment(TOKEN=self.token), **variables}
        pipes = dict.fromkeys(["stdout", "stderr"], subprocess.PIPE)
        self.process: subprocess.Popen[str] = subprocess.Popen(
            [*program, *WORDS, *words, f"hydra.run.dir={folder}"],
            env={name: value for name, value in merged.items() if value is not None},
            text=True,
            **{**pipes, "cwd": folder.parent, "preexec_fn": hear_of_hang_ups, **options},
        )

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


def hear_of_hang_ups() -> None:
    """Also where these tests run under `nohup`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def strike(rank: int, phase: str, how: str) -> list[str]:
    words = {"_target_": "faults.Strike", "rank": rank, "phase": phase, "how": how}
    return [f"+callbacks.strike.{key}={value}" for key, value in words.items()]


@pytest.fixture(scope="module")
def table() -> Iterator[list[list[Any]]]:
    """Rows, printed as Markdown at the end."""
    rows: list[list[Any]] = []
    yield rows
    columns = "what", "rank", "phase", "status", "seconds to the end", "processes left", "remains"
    print()
    for row in [columns, ["---"] * len(columns), *rows]:
        print("|", *(f"{cell} |" for cell in row))


@pytest.mark.parametrize(("how", "rank", "phase"), every())
def test_a_fault_ends_the_job_in_time_and_leaves_what_is_whole(tmp_path, table, how, rank, phase):
    is_parent = isinstance(how, signal.Signals)
    fault = strike(rank, phase, "hold" if is_parent else how)
    command = Command(tmp_path / "run", fault)
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
        # One that was stopped tells when it goes on, perhaps a little later than where it was.
        words = "faults.py" if how == "sleep" else "File "
        assert words in (command.folder / f"ranks/{rank}-0.stacks").read_text()
        assert f"rank {rank}, innermost call first:" in errors
        assert words in errors
    assert results["reason"] in (command.folder / "train.log").read_text()


def whole(folder: Path) -> str:
    """Each file that a run leaves can be read; what can be gone on with."""
    for path in folder.glob("checkpoints/*.*"):
        assert path.name.startswith(".") or torch.load(path, weights_only=True)
    path = begun(folder)
    return f"step {torch.load(path, weights_only=True)['global_step']}" if path else "config"


# Under an outside torchrun

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", TRAIN]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("number", "to"),
    [(signal.SIGTERM, "agent"), (signal.SIGTERM, "rank"), (signal.SIGUSR1, "agent")],
)
def test_torchruns_ranks_save_and_are_not_started_again(tmp_path, number, to):
    """torchrun itself ends with 1 if it got the signal, and with 0 if only the ranks have."""
    torchrun = TORCHRUN
    if number == signal.SIGUSR1:
        if "--signals-to-handle" not in get_args_parser().format_help():
            pytest.skip("this torchrun passes no other signals on")
        torchrun = [*TORCHRUN[:-1], "--signals-to-handle=SIGTERM,SIGINT,SIGUSR1", TRAIN]
    command = Command(tmp_path / "run", strike(1, "training", "hold"), torchrun)
    command.await_file("ranks/struck")
    rank = int((command.folder / "ranks/1.pid").read_text())
    os.kill(command.process.pid if to == "agent" else rank, number)
    status, errors, seconds, left = command.end(60)
    assert status == (1 if to == "agent" else 0), errors
    assert (left, seconds < 10) == (0, True)
    assert outcome(command.folder)["reason"].startswith(f"stopped by {number.name} at step ")
    assert whole(command.folder).startswith("step ")
    assert [path.name for path in command.folder.glob("ranks/1-*.log")] == ["1-0.log"]


@pytest.mark.faults
def test_no_rank_outlives_torchrun(tmp_path):
    command = Command(tmp_path / "run", strike(1, "training", "sleep"), TORCHRUN)
    command.await_file("ranks/struck")
    command.process.kill()
    status, _, seconds, left = command.end(60)
    assert (status, left, seconds < 10) == (-signal.SIGKILL, 0, True)


@pytest.mark.faults
@pytest.mark.parametrize("how", HANGS)
def test_torchruns_rank_that_makes_no_progress_is_found_and_named(tmp_path, how):
    command = Command(tmp_path / "run", strike(1, "training", how), TORCHRUN)
    command.await_file("ranks/struck")
    status, errors, seconds, left = command.end(60)
    assert (status, left, seconds < 10 + TIMEOUT) == (1, 0, True)
    assert errors.count("train.py: rank 1 made no progress") == 1
    words = f"rank 1 made no progress for {TIMEOUT} s (launch.timeout), in training after step 4"
    assert outcome(command.folder)["reason"].startswith(words)
    if how == "sleep":
        assert "faults.py" in (command.folder / "ranks/1-0.stacks").read_text()


# Terminals


@pytest.mark.faults
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_saves_and_ends_the_run_unless_nohup_says_no(tmp_path, nohup):
    main, terminal = os.openpty()

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    streams: dict[str, Any] = dict.fromkeys(["stdin", "stdout", "stderr"], terminal)
    hold = strike(0, "training", "hold")
    command = Command(tmp_path / "run", hold, preexec_fn=take_terminal, **streams)
    os.close(terminal)
    command.await_file("ranks/struck")
    os.close(main)
    status, _, seconds, left = command.end(60)
    expected = 0 if nohup else 128 + signal.SIGHUP
    assert (status, left) == (expected, 0), (command.folder / "train.log").read_text()
    assert outcome(command.folder)["status"] == ("complete" if nohup else "preempted")
    assert nohup or seconds < 10


# Restarts


@pytest.mark.faults
def test_after_a_hang_and_the_death_of_the_fork_server_the_same_bits(two_ranks, tmp_path):
    words = ["launch.max_restarts=2", *strike(1, "training", "stop")]
    command = Command(tmp_path / "run", words)
    command.await_file("ranks/1-1.log")  # of the second attempt
    pid = command.process.pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if "forkserver" in Path(f"/proc/{child}/cmdline").read_text():
            os.kill(int(child), signal.SIGKILL)
    status, errors, _, left = command.end(60)
    assert (status, left) == (0, 0), errors
    assert "Restart 1 of 2." in errors
    assert "Restart 2 of 2." in errors
    assert differences(two_ranks, command.folder) == []


# Neighbours


@pytest.mark.faults
def test_two_runs_at_once_with_the_same_port_and_the_same_data_to_pack(tmp_path):
    words = [f"data.root={tmp_path}/data", "data.source.num_train=3000"]
    port = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    commands = [Command(tmp_path / name, words, variables=port) for name in "ab"]
    ends = [command.end(120) for command in commands]
    assert [(status, left) for status, _, _, left in ends] == [(0, 0)] * 2, ends
    assert differences(tmp_path / "a", tmp_path / "b") == []
    assert len([*tmp_path.glob("data/.packed/*/images.npy")]) == 2  # train and test


def namespaces(*options: str) -> list[str]:
    """What runs a command in namespaces of its own, where this machine lets us."""
    words = ["unshare", *options]
    try:
        subprocess.run([*words, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"{' '.join(words)}: {error}")
    return words


@pytest.mark.faults
def test_a_mebibyte_of_shared_memory_and_256_open_files_are_enough(two_ranks, tmp_path):
    words = namespaces("--user", "--map-root-user", "--mount")
    little = 'mount -t tmpfs -o size=1m tmpfs /dev/shm && ulimit -n 256 && exec "$@"'
    program = [*words, "sh", "-c", little, "sh", sys.executable, TRAIN]
    command = Command(tmp_path / "run", ["data.num_workers=2"], program)
    status, errors, _, left = command.end(100)
    assert (status, left) == (0, 0), errors
    assert differences(two_ranks, command.folder) == []


@pytest.mark.faults
def test_nobody_trains_without_a_home_from_a_checkout_that_cannot_be_written(two_ranks, tmp_path):
    """As in a container that runs as some number."""
    unshare = namespaces("--user", "--map-user=12345", "--map-group=12345")
    checkout = tmp_path / "checkout"
    for name in "src", "conf":
        shutil.copytree(REPOSITORY / name, checkout / name)
    shutil.copy(TRAIN, checkout)
    for path in checkout.rglob("*"):
        path.chmod(path.stat().st_mode & ~0o222)
    checkout.chmod(0o555)
    nobody = {"HOME": None, "USER": None, "LOGNAME": None, "LC_ALL": "C", "LANG": None}
    nobody["PYTHONPATH"] = f"{checkout}/src:{REPOSITORY}/tests"
    program = [*unshare, sys.executable, f"{checkout}/train.py"]
    options: dict[str, Any] = {"variables": nobody, "cwd": checkout}
    status, errors, _, left = Command(checkout / "run", (), program, **options).end(100)
    assert (status, left) == (1, 0)
    assert errors == f"train.py: {checkout}/run: Permission denied.\n"
    command = Command(tmp_path / "run", [f"data.root={tmp_path}/data"], program, **options)
    status, errors, _, left = command.end(100)
    assert (status, left) == (0, 0), errors
    assert differences(two_ranks, command.folder) == []
