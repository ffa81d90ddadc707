"""The last operations of this process, and those that it waits for.

Each process group has a ring of its last operations. To note one costs less than a microsecond. The line that called an
operation is not noted; for the operation that is waited for, the Python stack has it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from .operation import Operation

_KEPT = 64  # operations per process group


class Journal:
    """The operations of one process group.

    Attributes:
        key: the process group's name, the same on all its ranks.
        name: of the communicator, for messages.
        ranks: global ranks.
        count: how many collectives this rank has begun; the same on all ranks that have come equally far.
        last: when each operation began, the operation, and :func:`place` then.
        waited: seconds that this process has waited for operations.
    """

    __slots__ = ("__weakref__", "count", "key", "last", "name", "ranks", "waited")

    def __init__(self, key: str, ranks: tuple[int, ...]) -> None:
        self.key = key
        self.name = f"ranks {', '.join(map(str, ranks))}"
        self.ranks = ranks
        self.count = 0
        self.waited = 0.0
        self.last: deque[tuple[float, Operation, str]] = deque(maxlen=_KEPT)

    def begin(self, name: bytes, tag: int) -> Operation:
        """Note a collective that begins."""
        self.count = number = self.count + 1
        operation = Operation(number, name, tag)
        self.last.append((time.monotonic(), operation, _place))
        return operation

    def note(self, name: bytes) -> Operation:
        """Note an operation between some of the ranks, which has no number."""
        operation = Operation(0, name, 0)
        self.last.append((time.monotonic(), operation, _place))
        return operation


journals: WeakKeyDictionary[dist.ProcessGroup, Journal] = WeakKeyDictionary()


def all_journals() -> list[Journal]:
    """The journals of all process groups, which another thread may be making just now."""
    while True:
        with contextlib.suppress(RuntimeError):  # the dictionary has changed in the middle
            return list(journals.values())


_place = ""


def place() -> str:
    """The place that was last passed to :func:`note_place`."""
    return _place


def note_place(text: str) -> None:
    """Note where the program is: a module, a micro-batch. Messages about failures include it."""
    global _place
    _place = text


class Wait(NamedTuple):
    """A wait for an operation.

    Attributes:
        begun: when (``time.monotonic``).
        journal: of the process group.
        operation: that the thread waits for.
        peers: the global ranks without which it does not end.
        place: see :func:`place`.
        limit: seconds that it may take; None: the time-out of the job.
    """

    begun: float
    journal: Journal
    operation: Operation
    peers: tuple[int, ...]
    place: str
    limit: float | None = None


waits: dict[int, Wait] = {}
"""The waits of this process, by the identity of the thread."""

limits: dict[int, float] = {}
"""Seconds that the next waits of some threads may take, by the identity of the thread."""


def begin_wait(journal: Journal, operation: Operation, peers: tuple[int, ...]) -> None:
    """This thread begins to wait; :func:`end_wait` ends it."""
    thread = threading.get_ident()
    waits[thread] = Wait(time.monotonic(), journal, operation, peers, _place, limits.get(thread))


def end_wait(journal: Journal) -> None:
    """This thread does not wait any more."""
    wait = waits.pop(threading.get_ident(), None)
    if wait is not None:
        journal.waited += time.monotonic() - wait.begun
