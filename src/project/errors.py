"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in a command, a config or a data folder: shown as its message, no traceback."""
