"""Counters in the rendezvous store that show whether all ranks have come, with the same value, at constant cost."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from typing import Any

_PAUSES = 0.0001, 0.02  # seconds between two looks at a key, the first and the last


class Tally:
    """Counts the ranks that have come, and checks that they have the same value.

    Each rank adds one to the upper bits of a number, and the digest of its value to the lower bits. If all values are
    the same, the sum of the digests is the number of ranks times the digest of this rank. That takes one request for
    each rank, and one for each look.

    Args:
        store: where nothing else uses ``key``.
        size: the number of ranks.
        value: of this rank, which comes now.

    Attributes:
        last: whether this rank was the last to come.
    """

    def __init__(self, store: Any, key: str, size: int, value: str) -> None:
        bits = size.bit_length()  # of the count; the sum has as many more than a digest
        width = 62 - 2 * bits
        self._store, self._key, self._size, self._shift = store, key, size, width + bits
        self._digest = int.from_bytes(hashlib.sha256(value.encode()).digest(), "little") & ((1 << width) - 1)
        self._total = store.add(key, (1 << self._shift) + self._digest)
        self.last = self.complete

    def look(self) -> bool:
        """Whether all have come."""
        self._total = self._store.add(self._key, 0)
        return self.complete

    @property
    def complete(self) -> bool:
        """Whether all had come at the last look."""
        return bool(self._total >> self._shift == self._size)

    @property
    def agrees(self) -> bool:
        """Whether all ranks, which have come, have the value of this rank."""
        return bool(self._total & ((1 << self._shift) - 1) == self._size * self._digest)


def missing(store: Any, keys: Sequence[str]) -> list[int]:
    """The indices of the keys that the store lacks. It takes few requests if few keys, or nearly all, are missing."""
    if not keys or store.check(list(keys)):
        return []
    if len(keys) == 1:
        return [0]
    half = len(keys) // 2
    return missing(store, keys[:half]) + [half + index for index in missing(store, keys[half:])]


def read_many(store: Any, keys: Sequence[str]) -> list[str]:
    """The values of keys that are there."""
    values: list[str] = []
    for begin in range(0, len(keys), 64):  # an answer of the store has a limit of some megabytes
        values += [value.decode() for value in store.multi_get(list(keys[begin : begin + 64]))]
    return values


def read_soon(store: Any, key: str, until: Callable[[], None]) -> str:
    """The value of a key that another rank is about to set. ``until`` is called while it is not there, and may raise.

    The store's own wait would keep other threads from the store.
    """
    pause = _PAUSES[0]
    while not store.check([key]):
        until()
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])
    value: bytes = store.get(key)
    return value.decode()
