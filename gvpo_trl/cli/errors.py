"""What a command raises for a user's mistake. Standard library only."""


class CommandError(Exception):
    """A user's mistake: printed in one or two lines, exit code 2."""
