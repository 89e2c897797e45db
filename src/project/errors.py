"""How a run fails: by a mistake that the user can mend, or by a rank."""


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
