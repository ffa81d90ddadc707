"""Collectives on the CPU by messages between all ranks.

[Note: direct exchange]
    What a large collective costs is the bytes that are copied, not the number of messages; a short one costs the
    trips that follow each other.  Gloo's ring all-gather copies its result twice and its reduce-scatter is a whole
    all-reduce.  Here every rank sends each peer just what that peer needs, straight between the callers' buffers: an
    all-gather moves (n-1)/n of the result per rank with no extra copy, a reduce-scatter moves (n-1)/n of the input
    with one receive buffer.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .combine import combine
from .operation import TAG_BITS, Operation
from .work import Pending, Work

# An all-reduce of up to this many bytes (of fewer on more ranks, in proportion) takes one trip: everyone sends all it
# has to everyone. On 2 to 8 ranks that takes a half to a third of the time of gloo's all-reduce, and less than a
# reduce-scatter and an all-gather.
_ONE_TRIP_BYTES = 1 << 18
_ONE_TRIP_RANKS = 8

# Gloo's tags are 31-bit. The upper half is for these messages. Their tags have to differ from those in flight, and
# say which operation the message belongs to: ranks that call different ones do not take each other's messages. The
# lower half is for the caller's sends and receives.
TAG_RANGE = 1 << 30
_TAGS = TAG_RANGE >> TAG_BITS  # of one operation's


class DirectExchange:
    """Collectives over the messages of one process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self._group = weakref.ref(group)  # this is kept as long as the group is
        self._tags = itertools.count()
        self._all_reduces: deque[Callable[[], None]] = deque()
        """The second halves of all-reduces in flight, in the order in which they began."""

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation) -> Work:
        return Pending(self._exchange([mine] * self.size, chunks, self._next_tag(operation)), None, (chunks, mine))

    def reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation) -> Work:
        received = chunks[0].new_empty(self.size - 1, out.numel())
        parts = [received[r if r < self.rank else r - 1] for r in range(self.size) if r != self.rank]
        parts.insert(self.rank, chunks[self.rank])
        works = self._exchange(chunks, parts, self._next_tag(operation))
        return Pending(works, lambda: combine(out, parts, op), (received, chunks))

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        nothing = flat[:0]
        sends = [flat if self.rank == root else nothing] * self.size
        recvs = [flat if r == root else nothing for r in range(self.size)]
        return Pending(self._exchange(sends, recvs, self._next_tag(operation)), None, flat)

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        # Not gloo's: its max and min lose a NaN, or keep it, depending on who holds it.
        if flat.nbytes * max(self.size, _ONE_TRIP_RANKS) <= _ONE_TRIP_BYTES * _ONE_TRIP_RANKS:
            return self._one_trip_all_reduce(flat, op, operation)
        return self._all_reduce_in_halves(flat, op, operation)

    def _one_trip_all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        reduced = torch.empty_like(flat)
        reduce = self.reduce_scatter(reduced, [flat] * self.size, op, operation)

        def finish() -> None:
            reduce.wait()
            flat.copy_(reduced)

        return Pending([], finish, flat)

    def _all_reduce_in_halves(self, flat: Tensor, op: str, operation: Operation) -> Work:
        chunks = evenly_cut(flat, self.size)
        mine = chunks[self.rank]
        reduced = torch.empty_like(mine)
        reduce = self.reduce_scatter(reduced, chunks, op, operation)
        # Taken now, so that ranks which wait for their collectives in different orders still agree.
        tag = self._next_tag(operation)
        done = False

        def complete() -> None:
            nonlocal done
            reduce.wait()
            mine.copy_(reduced)
            for work in self._exchange([mine] * self.size, chunks, tag):
                work.wait()
            done = True

        self._all_reduces.append(complete)

        def finish() -> None:
            while not done:  # every rank completes them in one order, whichever it waits for first
                self._all_reduces[0]()
                self._all_reduces.popleft()

        return Pending([], finish, flat)

    def _next_tag(self, operation: Operation) -> int:
        return TAG_RANGE + (next(self._tags) % _TAGS << TAG_BITS) + operation.tag

    def _exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> list[Any]:
        """Send ``sends[r]`` to, and receive ``recvs[r]`` from, every other rank r at once.

        Ranks agree on what is empty (the sizes are the same function of the ranks on both sides), so
        neither side waits for an empty message.
        """
        group = self._group()
        assert group is not None
        # The process group's own methods: those of torch.distributed cost several times as much.
        send, recv = group.send, group.recv
        works = []
        for k in range(1, self.size):
            source = (self.rank - k) % self.size
            if recvs[source].numel():
                works.append(recv([recvs[source]], source, tag))
        for k in range(1, self.size):
            target = (self.rank + k) % self.size
            if sends[target].numel():
                works.append(send([sends[target]], target, tag))
        return works


def evenly_cut(flat: Tensor, size: int) -> list[Tensor]:
    """A vector in ``size`` parts whose lengths differ by one at most."""
    bounds = [flat.numel() * r // size for r in range(size + 1)]
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]
