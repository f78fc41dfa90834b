"""What a command raises when a user can do something about it."""


class CommandError(Exception):
    """The command can't go on; the message says why and what would help."""
