"""SIGTERM and SIGINT in a rank: requests to stop, which training grants at a step of its choice."""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from project.errors import Preempted

GRACE = 6.0  # seconds that training has to reach a step boundary, of the 10 that a job may take

_pid = 0  # of the rank; children inherit its handlers
_is_training = False
_request = 0


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Makes requests to stop of both signals; raises Preempted wherever no training defers it."""
    global _pid, _is_training, _request
    _pid, _is_training, _request = os.getpid(), False, 0
    handlers = {signal.SIGTERM: _on_request, signal.SIGINT: _on_request, signal.SIGALRM: _on_alarm}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def finishing() -> Iterator[None]:
    """What a rank does last is not interrupted any more."""
    global _request
    before, _request = _request, _request or signal.SIGTERM
    try:
        yield
    finally:
        _request = before


def defer(is_training: bool) -> None:
    """While training, a request waits until `requested` is asked, for GRACE seconds at most."""
    global _is_training
    _is_training = is_training
    if _request and not is_training:
        signal.setitimer(signal.ITIMER_REAL, 0)


def requested() -> int:
    """The signal that asks this rank to stop, 0 for none."""
    return _request


def _on_request(number: int, frame: FrameType | None) -> None:
    global _request
    if os.getpid() != _pid:  # a loader worker: a signal to all processes is for the rank to answer
        if number == signal.SIGTERM:  # its rank may mean it, though: comply, but later
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, GRACE)
    elif not _request:
        _request = number
        if not _is_training:
            raise Preempted(number)
        signal.setitimer(signal.ITIMER_REAL, GRACE)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Preempted(_request)
