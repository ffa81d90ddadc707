"""Operations whose waits are recorded for the watch of this process."""

from __future__ import annotations

from .journal import Journal, begin_wait, end_wait
from .operation import Operation
from .watch import explained
from .work import Work


class Watched:
    """An operation in flight, whose waits are recorded for the watch."""

    __slots__ = ("_journal", "_operation", "_peers", "_work")

    def __init__(self, work: Work, journal: Journal, operation: Operation, peers: tuple[int, ...]) -> None:
        self._work, self._journal, self._operation, self._peers = work, journal, operation, peers

    def wait(self) -> None:
        begin_wait(self._journal, self._operation, self._peers)
        try:
            self._work.wait()
        except RuntimeError as error:
            explanation = explained(error)
            if explanation is error:
                raise
            raise explanation from error
        finally:
            end_wait(self._journal)

    def is_completed(self) -> bool:
        return self._work.is_completed()
