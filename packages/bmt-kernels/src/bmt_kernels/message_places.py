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
_KEPT = 1 << 27  # bytes that the process keeps after messages are received, in all exchanges; others are released
_adding = threading.Lock()  # to the set of all


class MessagePlaces:
    """The places of one exchange: free, reserved, and taken by messages that not all processes have received.

    Threads may use it at the same time: a thread that needs memory in one exchange frees places in others.

    Args:
        capacity: bytes of the memory, a multiple of the page size.
        is_received: whether all processes have received the message of a number.
        give_back: releases the memory between two places to the system.
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
        self._changing = threading.Lock()  # these
        self.kept = 0
        """Bytes, from the beginning of the memory, that stay when messages are gone."""
        with _adding:
            self._all.add(self)

    def has_room(self, size: int) -> bool:
        """Whether there is a place for a message of ``size`` bytes."""
        with self._changing:
            return self._find(size) is not None

    def reserve(self, size: int) -> int | None:
        """The first place for a message of ``size`` bytes, which will be put there later; None: there is no room."""
        if size > _KEPT:
            self.free_in_all()
        with self._changing:
            place = self._find(size)
            if place is not None:
                bisect.insort(self._taken, (place, place + pages(size)))
                self._reserved[place] = size
        return place

    def size_of(self, place: int) -> int:
        """Bytes for which a place is reserved."""
        return self._reserved[place]

    def put(self, place: int, number: int) -> bool:
        """The message of a number lies where a place is reserved; False: there are too many messages."""
        with self._changing:
            if len(self._messages) == MOST_MESSAGES:
                self._free()
                if len(self._messages) == MOST_MESSAGES:
                    return False
            self._messages.append((number, place, place + pages(self._reserved.pop(place))))
        return True

    def release(self, place: int) -> None:
        """A place is not reserved any more."""
        with self._changing:
            self._leave(place, place + pages(self._reserved.pop(place)))

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
        every = cls._every()
        for places in every:
            if places._messages and places._changing.acquire(blocking=False):
                try:
                    places._free()
                finally:
                    places._changing.release()
        return sum(places.bytes_in_use for places in every)

    @classmethod
    def _every(cls) -> list[MessagePlaces]:
        with _adding:
            return list(cls._all)

    def _find(self, size: int) -> int | None:
        self._free()
        if len(self._messages) == MOST_MESSAGES:
            return None
        size, cursor = pages(size), 0
        for begin, end in self._taken:
            if begin - cursor >= size:
                return cursor
            cursor = end
        return cursor if self.capacity - cursor >= size else None

    def _free(self) -> None:
        """Forget the messages that all have received."""
        while self._messages and self._is_received(self._messages[0][0]):
            _, begin, end = self._messages.popleft()
            if end > self.kept:
                self._keep(end)
            self._leave(begin, end)

    def _leave(self, begin: int, end: int) -> None:
        if end > self.kept:
            self._give_back(max(begin, self.kept), end)
        self._taken.remove((begin, end))

    def _keep(self, end: int) -> None:
        """Keep memory up to ``end``, as far as there is room for it in what the exchanges of the process may keep.

        Each may keep an equal part, and more while others do not need theirs.
        """
        others = [places for places in self._every() if places is not self and places.kept]
        part = _KEPT // (len(others) + 1) // _PAGE * _PAGE
        room = _KEPT - sum(places.kept for places in others)
        for places in sorted(others, key=lambda places: places.kept, reverse=True):
            if room >= min(end, part):
                break
            room += places._yield(min(end, part) - room, part)
        self.kept = max(self.kept, min(end, room // _PAGE * _PAGE))

    def _yield(self, wanted: int, part: int) -> int:
        """Release kept memory above ``part`` for another exchange, if no place is taken here; returns the bytes."""
        if not self._changing.acquire(blocking=False):
            return 0
        try:
            before, least = self.kept, pages(max(part, self.kept - wanted))
            if self._taken or least >= before:
                return 0
            self._give_back(least, before)
            self.kept = least
            return before - least
        finally:
            self._changing.release()


def _renew() -> None:
    """Another thread may have held the lock when this process was forked, and the places are its parent's."""
    global _adding
    _adding = threading.Lock()
    MessagePlaces._all = weakref.WeakSet()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def pages(size: int) -> int:
    """``size`` rounded up to a multiple of the page size, at least one page."""
    return max(1, -(-size // _PAGE)) * _PAGE
