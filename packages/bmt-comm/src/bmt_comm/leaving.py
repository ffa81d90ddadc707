"""What runs first when a process leaves a job: functions that others have registered, and their errors."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

_registered: list[tuple[int, Callable[[], object]]] = []  # with the process that has registered it
_log = logging.getLogger("bmt_comm")


def before_shutdown(call: Callable[[], object]) -> None:
    """Register a function that the next :func:`shutdown` calls first, on all ranks, while the process groups exist.

    It is called at exit, too, also without a context, and after an exception, when the other ranks may not come. If it
    raises there, the process ends with status 120.
    """
    _registered.append((os.getpid(), call))


def prepare_shutdown() -> list[Exception]:
    """Call what this process has registered by :func:`before_shutdown`. Returns the exceptions."""
    failures = []
    while _registered:
        process, call = _registered.pop()
        try:
            if process == os.getpid():
                call()
        except Exception as error:
            failures.append(error)
    return failures


def log_failures(failures: Sequence[Exception]) -> None:
    """Log exceptions that are not raised."""
    for failure in failures:
        _log.error("%s: %s", type(failure).__name__, failure)


def end_with_an_error() -> None:
    """Let this process, which is at its exit, end with status 120."""
    sys.stderr = _FailingStderr(sys.stderr)


class _FailingStderr:
    """Stands for ``sys.stderr``. Python ends with status 120 if its last flush fails.

    An exception in a function that runs at exit does not change the status. ``os._exit`` would leave out what others do
    at exit.
    """

    closed = False

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def flush(self) -> None:
        raise OSError("something failed at the end of the process; the log says what")
