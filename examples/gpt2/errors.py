"""Errors of usage."""


class UsageError(Exception):
    """A flag or a file does not fit; the message says which, and what would."""
