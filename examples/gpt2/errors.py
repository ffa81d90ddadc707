"""What went wrong is the user's to put right."""


class UsageError(Exception):
    """A flag or a file does not fit; the message says which, and what would."""
