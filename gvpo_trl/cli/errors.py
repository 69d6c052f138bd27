"""The exception that a command raises for a user's mistake. This module imports nothing."""


class CommandError(Exception):
    """A user's mistake: the command prints one or two lines and ends with exit code 2."""
