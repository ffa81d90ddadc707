"""Where messages lie in a process's memory; see [Note: memory of messages] of :mod:`bmt_kernels.shared_memory`."""

from __future__ import annotations

import bisect
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import ClassVar

_PAGE = mmap.PAGESIZE
MOST_MESSAGES = 4096  # that not all processes have received, in one exchange
_KEPT = 1 << 27  # bytes that stay this process's when messages are gone, in all exchanges; the others are given back
_adding = threading.Lock()  # to the set of all


class MessagePlaces:
    """The places of one exchange: what is free, what messages take that not all have received, and what is reserved.

    Only the thread that sends takes places. Another thread, which needs memory in its own exchange, may free some.

    Args:
        capacity: bytes of the memory, in whole pages.
        is_received: whether all processes have received the message of a number.
        give_back: lets the system have the memory between two places.
    """

    _all: ClassVar[weakref.WeakSet[MessagePlaces]] = weakref.WeakSet()

    def __init__(
        self, capacity: int, is_received: Callable[[int], bool], give_back: Callable[[int, int], None]
    ) -> None:
        self.capacity = capacity
        self._is_received, self._give_back = is_received, give_back
        self._messages: deque[tuple[int, int, int]] = deque()  # numbers, and where they begin and end
        self._taken: list[tuple[int, int]] = []  # where messages and reserved places begin and end, in their order
        self._reserved: dict[int, int] = {}  # bytes of the places that are reserved, by where they begin
        self._freeing = threading.Lock()
        self.kept = 0
        """Bytes, from the beginning of the memory, that stay when messages are gone."""
        with _adding:
            self._all.add(self)

    def find(self, size: int) -> int | None:
        """The first place for a message of ``size`` bytes, once those that all have received are gone."""
        if self.is_full():
            return None
        if size > _KEPT:
            self.free_in_all()
        size, cursor = pages(size), 0
        for begin, end in tuple(self._taken):  # another thread may free some
            if begin - cursor >= size:
                return cursor
            cursor = end
        return cursor if self.capacity - cursor >= size else None

    def is_full(self) -> bool:
        """Whether there are too many messages, once those that all have received are gone."""
        if self._messages:
            with self._freeing:
                self._free()
        return len(self._messages) == MOST_MESSAGES

    def take(self, place: int, size: int, number: int) -> None:
        """Put the message of a number there."""
        bisect.insort(self._taken, (place, place + pages(size)))
        self._messages.append((number, place, place + pages(size)))

    def reserve(self, size: int) -> int | None:
        """A place for a message of ``size`` bytes that will be put there later, if there is room."""
        place = self.find(size)
        if place is not None:
            bisect.insort(self._taken, (place, place + pages(size)))
            self._reserved[place] = size
        return place

    def size_of(self, place: int) -> int:
        """Bytes for which a place is reserved."""
        return self._reserved[place]

    def take_reserved(self, place: int, number: int) -> int:
        """Put the message of a number where a place is reserved; its bytes."""
        size = self._reserved.pop(place)
        self._messages.append((number, place, place + pages(size)))
        return size

    def release(self, place: int) -> None:
        """A place is not reserved any more."""
        end = place + pages(self._reserved.pop(place))
        if end > self.kept:
            self._give_back(max(place, self.kept), end)
        self._taken.remove((place, end))

    @property
    def has_reserved(self) -> bool:
        return bool(self._reserved)

    def oldest(self) -> int | None:
        """The number of the first message that not all have received."""
        first = next(iter(tuple(self._messages)), None)  # another thread may free it
        return None if first is None else first[0]

    @property
    def bytes_in_use(self) -> int:
        """Of messages that not all have received."""
        return sum(end - begin for _, begin, end in tuple(self._messages))

    @classmethod
    def free_in_all(cls) -> int:
        """Free what can be in all exchanges of this process; the bytes of messages that remain."""
        with _adding:
            every = list(cls._all)
        for places in every:
            if places._messages and places._freeing.acquire(blocking=False):
                try:
                    places._free()
                finally:
                    places._freeing.release()
        return sum(places.bytes_in_use for places in every)

    def _free(self) -> None:
        """Forget the messages that all have received."""
        while self._messages and self._is_received(self._messages[0][0]):
            _, begin, end = self._messages.popleft()
            if end > self.kept:  # all exchanges of the process have _KEPT in common
                with _adding:
                    others = sum(places.kept for places in self._all) - self.kept
                self.kept = max(self.kept, min(end, (_KEPT - others) // _PAGE * _PAGE))
                if end > self.kept:
                    self._give_back(max(begin, self.kept), end)
            self._taken.remove((begin, end))  # now that it is empty, it may be taken again


def _renew() -> None:
    """Another thread may have held the lock when this process was forked, and the places are its parent's."""
    global _adding
    _adding = threading.Lock()
    MessagePlaces._all = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def pages(size: int) -> int:
    """``size`` in whole pages, one at least."""
    return max(1, -(-size // _PAGE)) * _PAGE
