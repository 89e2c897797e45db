"""Standard streams that may be closed, or that nobody reads any more."""

import errno
import io
import os
import stat
import sys
from typing import Any, TextIO

# After `train.py | head`, once the reader at the other end of a network is gone, or the terminal.
UNREAD = errno.EPIPE, errno.ECONNRESET, errno.EIO


class Unfailing(io.FileIO):
    """The file of a standard stream: what nobody reads any more goes nowhere, and ends nothing."""

    def write(self, data: Any, /) -> int | None:
        """Writes bytes; returns how many."""
        try:
            return super().write(data)
        except OSError as error:
            is_on_disk = stat.S_ISREG(os.fstat(self.fileno()).st_mode)  # one that fails, say
            if is_on_disk or error.errno not in UNREAD:
                error.filename = "standard output" if self.fileno() == 1 else "standard error"
                raise
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self.fileno())
        os.close(null)
        return len(data)


def open_streams() -> None:
    """Makes standard output and error fail nobody, whoever writes there, also at the end of Python.

    Closed streams (`>&-`) get the null device, not the next file that is opened.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            free = os.open(os.devnull, os.O_RDWR)  # the lowest number, hence `number`
            os.set_inheritable(free, True)
    sys.stdout = _unfailing(sys.stdout, 1)
    sys.stderr = _unfailing(sys.stderr, 2)


def _unfailing(stream: Any, number: int) -> TextIO:
    if stream is not None and stream not in (sys.__stdout__, sys.__stderr__):
        return stream  # somebody has put it there
    names = "encoding", "errors", "line_buffering", "write_through"
    like = {name: getattr(stream, name) for name in names} if stream else {}
    file = Unfailing(number, "w", closefd=False)
    is_unbuffered = like.get("write_through")  # python -u
    if stream is not None:
        _flush(stream)
    return io.TextIOWrapper(file if is_unbuffered else io.BufferedWriter(file), **like)


def _flush(stream: TextIO) -> None:
    """Writes what was printed before, unless nobody reads it."""
    try:
        stream.flush()
    except OSError as error:
        if error.errno not in UNREAD:
            raise


def say(text: str, to: TextIO | None = None) -> None:
    """Prints lines at once, by default to standard output."""
    stream = to or sys.stdout
    stream.write(f"{text}\n")
    stream.flush()
