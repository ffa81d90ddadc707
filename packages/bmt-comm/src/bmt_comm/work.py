"""Collectives in flight."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Work(Protocol):
    """A collective in flight. ``wait`` makes its result usable: on CUDA by the current stream, on CPU by the host."""

    def wait(self) -> Any: ...

    def is_completed(self) -> bool:
        """Whether it is done, without waiting. On CPU it is known only after a wait."""
        ...


class _Done:
    """A collective that is done."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE: Work = _Done()


class Pending:
    """Works of the backend that make up one collective, and a function to call when they are done.

    Args:
        works: of the backend.
        finish: called once, in the first ``wait`` in which all works are done.
        keep: buffers that are kept alive until then.
        cancel: called when a wait ends with an exception; ends the works that are still under way.
    """

    def __init__(
        self,
        works: list[Any],
        finish: Callable[[], None] | None,
        keep: object,
        cancel: Callable[[], None] | None = None,
    ) -> None:
        self._works = works
        self._finish = finish
        self._keep = keep
        self._cancel = cancel
        self._error: Exception | None = None

    def wait(self) -> None:
        # The error is kept, so that a second wait neither succeeds nor takes the time-out again.
        if self._error is not None:
            raise self._error
        try:
            while self._works:
                self._works[-1].wait()
                self._works.pop()
            if self._finish is not None:
                self._finish()
        except BaseException as error:
            if isinstance(error, Exception):
                self._error = error
            if self._cancel is not None:
                self._cancel()
            raise
        self._finish = self._keep = None

    def is_completed(self) -> bool:
        return self._finish is None and all(work.is_completed() for work in self._works)
