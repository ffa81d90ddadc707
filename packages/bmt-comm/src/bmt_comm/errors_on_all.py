"""Errors of one rank that all ranks raise, so that none goes on, and waits for a rank that has stopped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .communicator import Communicator

# What a rank without an error of its own can raise; subclasses first.
_KINDS = (FileNotFoundError, OSError, ImportError, TypeError, ValueError, RuntimeError)


def raise_on_all(comm: Communicator, error: Exception | None) -> None:
    """Raise on every rank of ``comm`` if one of them has an error. Every rank must call it.

    The first rank that has one raises it. The other ranks raise one with its message and of its kind: an error of
    files, imports, types or values, or else a RuntimeError.
    """
    kind = next((n for n, each in enumerate(_KINDS) if isinstance(error, each)), None)
    if error is None:
        mine = None
    elif kind is None:
        mine = len(_KINDS) - 1, f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    else:
        mine = kind, str(error)
    reports = [mine] if comm.size == 1 else comm.all_gather_object(mine)
    first = next((report for report in reports if report is not None), None)
    try:
        if first is not None:
            if error is not None and kind is not None and first == mine:
                raise error
            raise _KINDS[first[0]](first[1]) from error
    finally:
        error = None  # its traceback refers to this frame, and so would keep itself alive


@contextmanager
def errors_on_all(comm: Communicator) -> Iterator[None]:
    """Every rank of ``comm`` runs this block. An Exception of one rank is raised on all of them, at its end."""
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    try:
        raise_on_all(comm, error)
    finally:
        error = None  # as above
