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
SECONDS_BETWEEN = 1.0  # two looks at a file that grows
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
_step = _phase = 0
_shown_at: Path | None = None  # a file whose time tells other jobs, too
_shown = 0


@contextlib.contextmanager
def beating(path: Path) -> Iterator[None]:
    """Lets `beat` write to a file, which stays there."""
    global _file, _step, _phase
    path.write_bytes(bytes(_LAYOUT.size))
    with path.open("r+b") as file:
        _file, _step, _phase = mmap.mmap(file.fileno(), _LAYOUT.size), 0, 0
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
    global _step, _phase
    if _file is None:
        return
    if step is not None:
        _step = step
    if phase is not None:
        _phase = PHASES.index(phase)
    now = time.time_ns()
    _LAYOUT.pack_into(_file, 0, _step, _phase, now)
    if _shown_at is not None:
        _show(now)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """For a while the rank does something else; if that fails, it is where it was to the end."""
    before = PHASES[_phase]
    beat(phase=name)
    yield
    beat(phase=before)


def read(path: Path) -> Beat:
    """The latest sign of life in a file; zeros if there is none yet."""
    content = path.read_bytes() if path.exists() else b""
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


def _show(now: int) -> None:
    global _shown
    if _shown_at is not None and now - _shown > 1e9:
        _shown = now
        with contextlib.suppress(FileNotFoundError):
            os.utime(_shown_at)


@contextlib.contextmanager
def while_growing(path: Path) -> Iterator[None]:
    """Beats as long as a file grows that somebody else's code writes, such as a download."""
    ended = threading.Event()

    def look() -> None:
        size = 0
        while not ended.wait(SECONDS_BETWEEN):
            with contextlib.suppress(FileNotFoundError):  # not there yet, or renamed
                before, size = size, path.stat().st_size
                if size != before:
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
