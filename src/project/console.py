"""Standard streams that may be closed, or that nobody reads any more."""

import contextlib
import errno
import os
import sys
import termios
from collections.abc import Iterator
from typing import TextIO

UNREAD = errno.EPIPE, errno.EIO  # after `train.py | head`, or once the terminal is closed


def open_streams() -> None:
    """Gives closed standard streams (`>&-`) the null device, not the next file that is opened."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            free = os.open(os.devnull, os.O_RDWR)  # the lowest number, hence `number`
            os.set_inheritable(free, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w")
    sys.stderr = sys.stderr or os.fdopen(2, "w")


def say(text: str, to: TextIO | None = None) -> None:
    """Prints lines at once, by default to standard output; that nobody reads them ends nothing."""
    stream = to or sys.stdout
    with _perhaps_unread(stream):
        stream.write(f"{text}\n")
        stream.flush()


def flush_streams() -> None:
    """Writes out what is left, so that it fails no process that ends: nobody may read any more."""
    for stream in sys.stdout, sys.stderr:
        with _perhaps_unread(stream):
            stream.flush()


@contextlib.contextmanager
def _perhaps_unread(stream: TextIO) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in UNREAD:
            raise
        read_by_nobody(stream)


def read_by_nobody(stream: TextIO) -> None:
    """After `train.py | head`: what is left to write, also at the end of Python, goes nowhere."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


def leave_terminal() -> None:
    """After a terminal was closed, what a process reads or writes there would fail."""
    for number in range(3):
        try:
            termios.tcgetattr(number)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # and not: it is a file, or a pipe
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, number)
                os.close(null)
