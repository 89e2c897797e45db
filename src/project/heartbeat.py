"""Signs of life: each rank leaves how far it has come and when, for whoever watches it.

A beat costs a copy of 24 bytes into a mapped file, no system call. The file outlives a killed rank.
"""

import contextlib
import faulthandler
import mmap
import os
import signal
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PHASES = ("set-up", "training", "validation", "saving", "test")
_LAYOUT = struct.Struct("<qqq")


class Beat(NamedTuple):
    """The latest sign of life of a rank.

    Args:
        step: optimizer steps done.
        phase: one of PHASES, by number.
        time: nanoseconds since 1970.
    """

    step: int
    phase: int
    time: int

    @property
    def doing(self) -> str:
        """Its phase in words."""
        return PHASES[self.phase]


_file: mmap.mmap | None = None  # of this rank; none in other processes
_now = Beat(0, 0, 0)
_shown_at: Path | None = None  # a file whose time tells other jobs, too
_shown = 0


@contextlib.contextmanager
def beating(path: Path) -> Iterator[None]:
    """Lets `beat` write to a file, which stays there; None of it happens in other processes."""
    global _file, _now
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        _file, _now = mmap.mmap(file.fileno(), _LAYOUT.size), Beat(0, 0, 0)
    try:
        beat()
        yield
    finally:
        _file = None


def beat(step: int | None = None, phase: str | None = None) -> None:
    """Leaves a sign of life; in a process that is no rank it does nothing.

    Args:
        step, phase: where the rank is now; None for where it was.
    """
    global _now
    if _file is not None:
        step = _now.step if step is None else step
        number = _now.phase if phase is None else PHASES.index(phase)
        _now = Beat(step, number, time.time_ns())
        _LAYOUT.pack_into(_file, 0, *_now)
        if _shown_at:
            _show()


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """For a while the rank does something else."""
    before = _now.doing
    beat(phase=name)
    yield
    beat(phase=before)


def read(path: Path) -> Beat:
    """The latest sign of life in a file."""
    content = path.read_bytes()
    return Beat(*_LAYOUT.unpack(content)) if len(content) == _LAYOUT.size else Beat(0, 0, 0)


@contextlib.contextmanager
def shown_at(path: Path) -> Iterator[None]:
    """Each second's beat also touches a file, for those who wait for this rank's work."""
    global _shown_at
    _shown_at = path
    try:
        yield
    finally:
        _shown_at = None


def _show() -> None:
    global _shown
    if _shown_at and _now.time - _shown > 1e9:
        _shown = _now.time
        with contextlib.suppress(FileNotFoundError):
            os.utime(_shown_at)


@contextlib.contextmanager
def while_growing(path: Path) -> Iterator[None]:
    """Beats as long as a file grows that somebody else's code writes, such as a download."""
    ended = threading.Event()

    def look() -> None:
        size = 0
        while not ended.wait(1):
            if path.exists() and size != (size := path.stat().st_size):
                beat()

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@contextlib.contextmanager
def stacks_on_request(path: Path) -> Iterator[None]:
    """SIGUSR2 writes the stacks of all threads to a file, also while they wait in C++."""
    with path.open("a") as file:
        faulthandler.register(signal.SIGUSR2, file, all_threads=True)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR2)
            if not path.stat().st_size:
                path.unlink()
