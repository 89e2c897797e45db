"""Who is watched, and who is at fault, without processes; tests/test_faults.py has real ones."""

import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from project import heartbeat, pack, watchdog
from project.errors import Preempted, RankFailed
from project.failure import first_report, write_report
from project.heartbeat import Beat
from project.processes import Rank
from project.watchdog import Watchdog


@pytest.fixture
def looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A watch over ranks of the test's own making: looks(seconds since the last, beats)."""
    now = [0.0]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        watchdog.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    ranks = [Rank(0, 1, True), Rank(1, 1, True)]
    monkeypatch.setattr(watchdog, "ranks_of", lambda folder, but: ranks)
    monkeypatch.setattr(watchdog, "send_to", lambda pids, number: None)
    own = Watchdog(tmp_path, attempt=0, timeout=10, here=range(2))

    def look(seconds: float, *times: int) -> None:
        now[0] += seconds
        beats = {f"{rank}.beat": Beat(7, 1, time) for rank, time in enumerate(times)}
        monkeypatch.setattr(heartbeat, "read", lambda path: beats[path.name])
        own.look()

    look.ranks, look.folder = ranks, tmp_path  # type: ignore[attr-defined]
    (tmp_path / "ranks").mkdir()
    for rank in ranks:
        (tmp_path / f"ranks/{rank.number}.beat").touch()
    return look


def test_a_rank_without_a_sign_of_life_is_named_in_time(looks):
    for second in range(10):
        looks(1, second, 0)
    with pytest.raises(RankFailed, match=r"rank 1 made no progress for 10 s .* in training after"):
        looks(1, 99, 0)


def test_as_long_as_all_show_life_nobody_is_late(looks):
    for second in range(100):
        looks(1, second, second)


def test_nobody_was_late_while_the_one_that_watches_was_stopped_itself(looks):
    looks(1, 0, 0)
    looks(1000, 0, 0)
    looks(1, 1, 1)


@pytest.mark.parametrize(
    "wait",
    [
        'File "/x/torch/distributed/distributed_c10d.py", line 1 in all_reduce',
        'File "/x/torch/autograd/graph.py", line 1 in _engine_run_backward',
    ],
)
def test_of_two_that_are_late_the_one_that_does_not_wait_for_the_other_is_at_fault(looks, wait):
    other = "Thread 1 (most recent call first):\n  File nowhere\n\n"
    for rank, innermost in enumerate([wait, 'File "my.py", line 3 in forward']):
        text = f"{other}Current thread 2 (most recent call first):\n  {innermost}\n  File more\n"
        (looks.folder / f"ranks/{rank}-0.stacks").write_text(text)
    for _ in range(10):
        looks(1, 5, 9)  # the last sign of rank 1 is the later one
    with pytest.raises(RankFailed, match="rank 1 made no progress") as caught:
        looks(1, 5, 9)
    assert caught.value.traceback.splitlines()[:2] == [
        "rank 1, innermost call first:",
        '  File "my.py", line 3 in forward',
    ]


def test_the_first_to_be_late_is_not_at_fault_if_it_waits_for_another(looks):
    """That one has slept a while, and gone on a while, before it stands still."""
    for rank, innermost in enumerate(['File "torch/distributed/x.py"', 'File "my.py"']):
        text = f"Current thread 2 (most recent call first):\n  {innermost}, line 1 in f\n"
        (looks.folder / f"ranks/{rank}-0.stacks").write_text(text)
    for second in range(10):
        looks(1, 0, min(second, 4))
    with pytest.raises(RankFailed, match="rank 1 made no progress"):
        looks(1, 0, 4)


def test_a_rank_that_is_gone_without_a_word_ends_the_others_if_nothing_else_does(looks):
    looks(1, 0, 0)
    looks.ranks[1] = Rank(1, 1, False)
    looks(1, 1, 0)
    looks(1, 2, 0)  # the agent may still say more
    looks(1, 3, 0)
    with pytest.raises(RankFailed, match="rank 1 died without a word"):
        looks(1, 4, 0)


def test_a_process_that_never_comes_to_be_a_rank_is_named(looks):
    (looks.folder / "ranks/1.beat").unlink()
    looks.ranks.pop()
    for second in range(70):
        looks(1, second)
    with pytest.raises(RankFailed, match="rank 1 has not begun in 71 s"):
        looks(1, 70)


def test_the_process_of_a_rank_that_has_ended_is_not_waited_for_for_ever(looks, monkeypatch):
    sent: list[tuple[list[int], int]] = []
    monkeypatch.setattr(watchdog, "send_to", lambda pids, number: sent.append((pids, number)))
    monkeypatch.setattr(watchdog, "_is_rank", lambda pid: pid == 1)
    looks(1, 0, 0)
    looks.ranks.clear()
    for _ in range(60):
        looks(1)
    assert not sent
    looks(1)
    assert sent == [([1], signal.SIGKILL)]


def test_the_first_report_says_how_an_attempt_ended(tmp_path):
    (tmp_path / "ranks").mkdir()
    assert first_report(tmp_path) is None
    write_report(tmp_path / "ranks/1-0", "stopped by SIGTERM at step 5, saved", signal=15)
    time.sleep(0.001)
    write_report(tmp_path / "ranks/0-0", "rank 0 failed: RuntimeError: closed", "Traceback")
    report = first_report(tmp_path)
    assert isinstance(report, Preempted)
    assert str(report) == "stopped by SIGTERM at step 5, saved"


def test_a_warning_of_a_scheduler_ends_with_the_status_of_its_sigterm():
    numbers = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP
    assert [Preempted(number).status for number in numbers] == [143, 143, 130, 129]


# Signs of life


def test_who_waits_for_a_packer_is_alive_as_long_as_the_packer_is(tmp_path):
    path, beats = tmp_path / "lock", tmp_path / "0.beat"

    def wait() -> None:
        with path.open("a") as file:
            pack._wait_for(path, file)

    with path.open("w") as held, heartbeat.beating(beats):
        fcntl.flock(held, fcntl.LOCK_EX)
        waiter = threading.Thread(target=wait)
        waiter.start()
        time.sleep(3 * pack.SECONDS_BETWEEN)
        before = heartbeat.read(beats)
        time.sleep(3 * pack.SECONDS_BETWEEN)
        assert heartbeat.read(beats) == before  # nobody works
        os.utime(path, (1, 1))
        until = time.monotonic() + 10
        while heartbeat.read(beats) == before:
            assert time.monotonic() < until
            time.sleep(0.01)
        fcntl.flock(held, fcntl.LOCK_UN)
        waiter.join()


def test_a_packers_signs_of_life_are_seen_by_other_jobs(tmp_path):
    (tmp_path / "lock").touch()
    os.utime(tmp_path / "lock", (1, 1))
    with heartbeat.beating(tmp_path / "0.beat"), heartbeat.shown_at(tmp_path / "lock"):
        heartbeat.beat()
    assert (tmp_path / "lock").stat().st_mtime > 1


def test_a_download_shows_life_as_long_as_its_file_grows(tmp_path, monkeypatch):
    beats: list[int] = []
    monkeypatch.setattr(heartbeat, "beat", lambda: beats.append(1))
    monkeypatch.setattr(heartbeat, "SECONDS_BETWEEN", 0.01)
    with heartbeat.while_growing(tmp_path / "file"):
        for size in range(1, 4):
            (tmp_path / "file").write_bytes(bytes(size))
            until = time.monotonic() + 10
            while len(beats) < size:
                assert time.monotonic() < until
                time.sleep(0.001)
        time.sleep(0.1)
        assert len(beats) == 3


def test_a_process_that_is_no_rank_leaves_no_sign(tmp_path):
    with heartbeat.beating(tmp_path / "0.beat"):
        heartbeat.beat(5, "test")
    before = heartbeat.read(tmp_path / "0.beat")
    heartbeat.beat(6)
    assert heartbeat.read(tmp_path / "0.beat") == before
    assert (before.step, before.doing) == (5, "test")
