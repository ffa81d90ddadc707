"""Collectives on the CPU by messages between all ranks.

[Note: direct exchange]
    What a large collective costs is the bytes that are copied, not the number of messages; a short one costs the
    trips that follow each other.  Gloo's ring all-gather copies its result twice and its reduce-scatter is a whole
    all-reduce.  Here every rank sends each peer just what that peer needs, straight between the callers' buffers: an
    all-gather moves (n-1)/n of the result per rank with no extra copy, a reduce-scatter moves (n-1)/n of the input
    with one receive buffer.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .combine import TORCH_OPS, combine
from .operation import TAG_BITS, Operation
from .receive_memory import ReceiveMemory, of_process
from .work import Pending, Work

# An all-reduce of up to this many bytes (of fewer on more ranks, in proportion) takes one trip: everyone sends all it
# has to everyone. On 2 to 8 ranks that takes a half to a third of the time of gloo's all-reduce, and less than a
# reduce-scatter and an all-gather. Two ranks send no more than they must.
_ONE_TRIP_BYTES = 1 << 18
_ONE_TRIP_RANKS = 8
_ONE_TRIP_BYTES_OF_PAIR = 1 << 22

_SEGMENT_BYTES = 1 << 23  # of a larger all-reduce
_UNDER_WAY = 4  # segments

# What gloo reduces as we do. Its max and min lose a NaN, or keep it, depending on who holds it. Its ring gives every
# rank the same bits, but of more than two ranks in another order.
_OF_GLOO = {
    **dict.fromkeys((torch.float32, torch.float64), ("sum", "avg")),
    **dict.fromkeys((torch.int32, torch.int64, torch.int8, torch.uint8), ("sum", "max", "min", "prod")),
}

# Gloo's tags are 31-bit. The upper half is for these messages. Their tags have to differ from those in flight, and
# say which operation the message belongs to: ranks that call different ones do not take each other's messages. The
# lower half is for the caller's sends and receives.
TAG_RANGE = 1 << 30
_TAGS = TAG_RANGE >> TAG_BITS  # of one operation's
_AT_ONCE = datetime.timedelta(milliseconds=1)
_LANES = 8  # exchanges of one process group whose messages are told apart
_TAG_OF_NONE = TAG_RANGE + (_LANES - 1 << TAG_BITS)  # the last lane, which no exchange has


class DirectExchange:
    """Collectives over the messages of one process group.

    Args:
        group: the process group.
        members: those of its ranks that take part, this one among them; None: all.
        lane: below 8. Exchanges of one group in which the same two ranks take part have different ones.
        memory: for what is received and reduced; by default that of the process.
        seconds_left: that a wait for a message may take; None: as long as the group says.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int] | None = None,
        lane: int = 0,
        memory: ReceiveMemory = of_process,
        seconds_left: Callable[[], float] | None = None,
    ) -> None:
        self._members = range(group.size()) if members is None else members
        self.rank, self.size = self._members.index(group.rank()), len(self._members)
        self._group = weakref.ref(group)  # this is kept as long as the group is
        self._are_all = group.size() == len(self._members)
        self._tags = itertools.count(lane, _LANES)
        self.memory = memory
        self._seconds_left = seconds_left
        self._all_reduces: deque[_SegmentedAllReduce] = deque()
        """Those in flight, in the order in which they began."""

    def among(self, members: Sequence[int], lane: int) -> DirectExchange:
        """One of some ranks of the group."""
        group = self._of_group()
        return DirectExchange(group, members, lane, self.memory, self._seconds_left)

    def all_gather(
        self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        return Pending(self.exchange([mine] * self.size, chunks, self.next_tag(operation)), None, (chunks, mine))

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        """``out`` may be the chunk of this rank, and all chunks one tensor."""
        mine = chunks[self.rank]
        received = self.memory.take(self.size - 1, mine.numel(), mine.dtype)
        parts = self.with_mine(received, mine)
        works = self.exchange(chunks, parts, self.next_tag(operation))

        def finish() -> None:
            self.combine(out, parts, op)
            self.memory.give_back(received)

        # What a wait ends with an exception is not given back: it may still be written.
        return Pending(works, finish, (received, chunks))

    def with_mine(self, received: Tensor, mine: Tensor) -> list[Tensor]:
        """The parts of all ranks, of which those of the others are rows of ``received``."""
        parts = list(received.unbind())
        parts.insert(self.rank, mine)
        return parts

    def combine(self, out: Tensor, parts: list[Tensor], op: str) -> None:
        """Reduce ``parts`` into ``out``, which may be this rank's part."""
        if self.rank > 1 and out.data_ptr() == parts[self.rank].data_ptr():
            parts[self.rank] = out.clone()
        combine(out, parts, op)

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        nothing = flat[:0]
        sends = [flat if self.rank == root else nothing] * self.size
        recvs = [flat if r == root else nothing for r in range(self.size)]
        return Pending(self.exchange(sends, recvs, self.next_tag(operation)), None, flat)

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        size = flat.nbytes
        if size * max(self.size, _ONE_TRIP_RANKS) <= _ONE_TRIP_BYTES * _ONE_TRIP_RANKS:
            return self.reduce_scatter(flat, [flat] * self.size, op, operation)
        if self._are_all and op in _OF_GLOO.get(flat.dtype, ()):
            return self._all_reduce_by_gloo(flat, op, operation)
        if self.size == 2 and size <= _ONE_TRIP_BYTES_OF_PAIR:
            return self.reduce_scatter(flat, [flat] * self.size, op, operation)
        return self._all_reduce_in_segments(flat, op, operation)

    def _all_reduce_by_gloo(self, flat: Tensor, op: str, operation: Operation) -> Work:
        group = self._of_group()
        # Gloo adds up whatever the other ranks reduce at the time. These messages say that it is the same.
        token = torch.zeros(1, dtype=torch.uint8, device="cpu")
        received = [torch.empty_like(token) for _ in range(self.size)]
        tokens = self.exchange([token] * self.size, received, self.next_tag(operation))
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(TORCH_OPS["sum" if op == "avg" else op])
        reducing = group.allreduce([flat], options)

        def finish() -> None:
            if op == "avg":
                flat.div_(self.size)

        return Pending([*self._limited([reducing]), *tokens], finish, (flat, token, received))

    def _all_reduce_in_segments(self, flat: Tensor, op: str, operation: Operation) -> Work:
        all_reduce = _SegmentedAllReduce(self, flat, op, operation)
        self._all_reduces.append(all_reduce)

        def finish() -> None:
            while not all_reduce.done:  # every rank completes them in one order, whichever it waits for first
                self._all_reduces[0].complete()
                self._all_reduces.popleft()

        return Pending([], finish, flat)

    def next_tag(self, operation: Operation) -> int:
        return TAG_RANGE + (next(self._tags) % _TAGS << TAG_BITS) + operation.tag

    def exchange(self, sends: Sequence[Tensor], recvs: Sequence[Tensor], tag: int) -> list[Any]:
        """Send ``sends[r]`` to, and receive ``recvs[r]`` from, every other rank r at once.

        Ranks agree on what is empty (the sizes are the same function of the ranks on both sides), so
        neither side waits for an empty message.
        """
        group = self._of_group()
        # The process group's own methods: those of torch.distributed cost several times as much.
        send, recv = group.send, group.recv
        works = []
        for k in range(1, self.size):
            source = (self.rank - k) % self.size
            if recvs[source].numel():
                works.append(recv([recvs[source]], self._members[source], tag))
        for k in range(1, self.size):
            target = (self.rank + k) % self.size
            if sends[target].numel():
                works.append(send([sends[target]], self._members[target], tag))
        return self._limited(works)

    def stop(self) -> None:
        """Let all waits for messages of the process group end with an error, in other threads and on other ranks too.

        Gloo does so when one of them reaches its limit, unless it fails earlier because its peer has gone.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer, rank in enumerate(self._members):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._of_group().recv([nothing], rank, _TAG_OF_NONE).wait(_AT_ONCE)

    def _of_group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None
        return group

    def _limited(self, works: list[Any]) -> list[Any]:
        return works if self._seconds_left is None else [_Limited(work, self._seconds_left) for work in works]


class _Limited:
    """A message in flight whose wait has a limit, known when it begins."""

    def __init__(self, work: Any, seconds_left: Callable[[], float]) -> None:
        self._work, self._seconds_left = work, seconds_left
        self.is_completed = work.is_completed

    def wait(self) -> None:
        self._work.wait(max(_AT_ONCE, datetime.timedelta(seconds=self._seconds_left())))


class _SegmentedAllReduce:
    """An all-reduce of which few segments are under way at a time, so that it takes little memory.

    A segment is reduced in parts, one on each rank, and these are gathered while later segments are reduced.
    """

    def __init__(self, exchange: DirectExchange, flat: Tensor, op: str, operation: Operation) -> None:
        self.done = False
        self._exchange, self._op = exchange, op
        self._segments = flat.split(_SEGMENT_BYTES // flat.element_size())
        # Taken now, so that ranks which wait for their collectives in different orders still agree.
        self._tags = [[exchange.next_tag(operation) for _ in range(2)] for _ in self._segments]
        count, others = min(_UNDER_WAY, len(self._segments)), exchange.size - 1
        longest = -(-self._segments[0].numel() // exchange.size)
        self._memory = exchange.memory.take(count * others, longest, flat.dtype)
        self._buffers = self._memory.view(count, others, longest)
        self._reducing = deque(self._reduce(number) for number in range(count))
        self._gathering: deque[list[Any]] = deque()
        self._reduced = 0  # segments

    def _reduce(self, number: int) -> tuple[list[Any], list[Tensor]]:
        """Send and receive what this rank is to reduce: the works, and all ranks' parts."""
        exchange = self._exchange
        chunks = evenly_cut(self._segments[number], exchange.size)
        mine = chunks[exchange.rank]
        parts = exchange.with_mine(self._buffers[number % len(self._buffers), :, : mine.numel()], mine)
        return exchange.exchange(chunks, parts, self._tags[number][0]), parts

    def complete(self) -> None:
        """Wait for all of it. An error leaves it as it is."""
        exchange = self._exchange
        while self._reducing:
            works, parts = self._reducing[0]
            _wait_for(works)
            mine = parts[exchange.rank]
            exchange.combine(mine, parts, self._op)
            self._reducing.popleft()
            number, self._reduced = self._reduced, self._reduced + 1
            chunks = evenly_cut(self._segments[number], exchange.size)
            self._gathering.append(exchange.exchange([mine] * exchange.size, chunks, self._tags[number][1]))
            if number + len(self._buffers) < len(self._segments):
                self._reducing.append(self._reduce(number + len(self._buffers)))
            while len(self._gathering) > _UNDER_WAY:
                self._gather_first()
        while self._gathering:
            self._gather_first()
        exchange.memory.give_back(self._memory)
        self.done = True

    def _gather_first(self) -> None:
        _wait_for(self._gathering[0])
        self._gathering.popleft()


def _wait_for(works: list[Any]) -> None:
    """What has been waited for is not waited for again, if one that follows fails."""
    while works:
        works[-1].wait()
        works.pop()


def evenly_cut(flat: Tensor, size: int) -> list[Tensor]:
    """A vector in ``size`` parts whose lengths differ by one at most."""
    bounds = [flat.numel() * r // size for r in range(size + 1)]
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]
