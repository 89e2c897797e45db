"""Requests to stop: in a rank training grants them at a step of its choice."""

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

from project.errors import Preempted

# Also: the warning of a scheduler, and a terminal that was closed.
REQUESTS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP
GRACE = 6.0  # seconds that training has to reach a step boundary, of the 10 that a job may take

_pid = 0  # of the rank; children inherit its handlers
_request = 0  # to the rank
_asked = 0  # the same to the process that launches
_is_training = _is_ending = False


def granted_at_once() -> None:
    """For the process that launches: the first request raises Preempted, later ones do nothing."""
    global _asked
    _asked = 0
    _install(_all(_at_once))
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # it asks ranks for their stacks


def asked() -> int:
    """The signal that has asked the process that launches to stop, 0 for none."""
    return _asked


def ignored() -> None:
    """A process that is about to end does so as it said, whatever it is asked at the last moment.

    Python gives signals their default action back when it ends, but leaves alone what is ignored.
    """
    _install(dict.fromkeys(REQUESTS, signal.SIG_IGN))


def left_to_children() -> None:
    """In the process that ranks are forked from: a request to all processes is for them."""
    _install(_all(lambda number, frame: None))


def restored() -> None:
    """In a process that was forked from it: requests have their default action again."""
    _install(_all(signal.SIG_DFL))


@contextlib.contextmanager
def received(receive: Callable[[int], object]) -> Iterator[None]:
    """For the process that launches, while ranks run: the first request is what `receive` gets.

    That may be an earlier one, raised where Python lets no exception out (a weak reference's end).
    """

    def handler(number: int, frame: FrameType | None) -> None:
        global _asked
        if not _asked:
            _asked = number
            receive(number)

    if _asked:
        receive(_asked)
    with _installed(_all(handler)):
        yield


@contextlib.contextmanager
def held() -> Iterator[None]:
    """For imports of torch in the process that launches: a request is granted at their end.

    Its modules in C++ would not let an exception out, and abort. Of a sweep's jobs at once the
    threads get no signals.
    """
    requests: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    with received(requests.append) if is_main else contextlib.nullcontext():
        yield
    if requests:
        raise Preempted(requests[0])


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Makes requests to stop of signals; raises Preempted wherever no training defers it."""
    global _pid, _request, _is_training, _is_ending
    _pid, _request, _is_training, _is_ending = os.getpid(), 0, False, False
    with _installed({**_all(_on_request), signal.SIGALRM: _on_alarm}):
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def fatal() -> Iterator[None]:
    """Here a request ends this process at once.

    For a rank that meets the others: there is nothing to save, and it waits in C++, where no
    handler of Python runs, also for one that has left already.
    """
    with _installed(_all(signal.SIG_DFL)):
        yield


def leave_to_rank() -> None:
    """In a loader worker, which complies later, should its rank not be there any more.

    torch has given it a handler of SIGTERM that ends it at once, and so would fail its rank.
    """
    signal.signal(signal.SIGTERM, _on_request)


def defer(is_training: bool) -> None:
    """While training, a request waits until `requested` is asked, for GRACE seconds at most."""
    global _is_training
    _is_training = is_training


def end() -> None:
    """From here on a rank only leaves word of how it ended, which no request interrupts."""
    global _is_ending
    _is_ending = True
    signal.setitimer(signal.ITIMER_REAL, 0)


def requested() -> int:
    """The signal that asks this rank to stop, 0 for none."""
    return _request


def _all(handler: Any) -> dict[signal.Signals, Any]:
    """A handler for each request; not for a hang-up that `nohup` lets us ignore."""
    ignored = {signal.SIGHUP} if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else set()
    return dict.fromkeys(set(REQUESTS) - ignored, handler)


@contextlib.contextmanager
def _installed(handlers: Mapping[signal.Signals, Any]) -> Iterator[None]:
    """Handles signals in other ways for a while."""
    before = _install(handlers)
    try:
        yield
    finally:
        _install(before)


def _install(handlers: Mapping[signal.Signals, Any]) -> dict[signal.Signals, Any]:
    """Returns those that were there before."""
    return {number: signal.signal(number, handler) for number, handler in handlers.items()}


def _at_once(number: int, frame: FrameType | None) -> None:
    global _asked
    if not _asked:
        _asked = number
        raise Preempted(number)


def _on_request(number: int, frame: FrameType | None) -> None:
    global _request
    if os.getpid() != _pid or _is_ending:
        # In a loader worker: a signal to all processes is for the rank to answer, so comply later.
        _request = _request or number
        if number == signal.SIGTERM:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, GRACE)
    elif not _request:
        _request = number
        if not _is_training:
            raise Preempted(number)
        signal.setitimer(signal.ITIMER_REAL, GRACE)


def _on_alarm(number: int, frame: FrameType | None) -> None:
    raise Preempted(_request, f", {GRACE:.0f} s brought no step at which to save")
