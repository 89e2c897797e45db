"""How a run ends early: by a mistake that the user can mend, by a rank, or by a request."""

import signal


class UserError(Exception):
    """A mistake in a command, a config or a data folder: shown as its message, no traceback."""


class RankFailed(Exception):
    """A rank ended a job.

    Attributes:
        traceback: that rank's, empty if it died without a word.
    """

    def __init__(self, reason: str, traceback: str = "") -> None:
        super().__init__(reason)
        self.traceback = traceback


class Preempted(BaseException):
    """A signal asked the run to stop. No Exception, as KeyboardInterrupt, so that none swallows it.

    Args:
        number: of the signal.
        where: what was saved, for messages.

    Attributes:
        status: with which the process ends that the user has started.
    """

    def __init__(self, number: int, where: str = "") -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}{where}")
        self.number = number
        # SIGUSR1 is how a scheduler announces its SIGTERM (Slurm: --signal=B:USR1@60).
        self.status = 128 + (signal.SIGTERM if number == signal.SIGUSR1 else number)
