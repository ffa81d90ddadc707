"""Collectives on the CPU by messages between all ranks.

[Note: direct exchange]
    A large collective costs the bytes that are copied, not the number of messages. A short one costs the messages that
    follow one another. Gloo's ring all-gather copies its result twice, and its reduce-scatter is an entire all-reduce.
    Here every rank sends each peer just what that peer needs, straight between the callers' buffers. An all-gather
    moves (n-1)/n of the result per rank without an extra copy. A reduce-scatter moves (n-1)/n of the input, with one
    receive buffer.
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

# An all-reduce of up to this many bytes (fewer on more than 8 ranks, in proportion) is one-shot: every rank sends its
# input to every other rank. On 2 to 8 ranks that takes a half to a third of the time of gloo's all-reduce, and less
# than a two-shot all-reduce (a reduce-scatter and an all-gather). Two ranks send no more than they must.
_ONE_SHOT_BYTES = 1 << 18
_ONE_SHOT_RANKS = 8
_ONE_SHOT_BYTES_OF_PAIR = 1 << 22

_SEGMENT_BYTES = 1 << 23  # of a larger all-reduce
_UNDER_WAY = 4  # segments

# What gloo reduces as this module does. Its max and min lose or keep a NaN, depending on the rank that holds it. Its
# ring gives every rank the same bits, but sums over more than two ranks in another order.
_OF_GLOO = {
    **dict.fromkeys((torch.float32, torch.float64), ("sum", "avg")),
    **dict.fromkeys((torch.int32, torch.int64, torch.int8, torch.uint8), ("sum", "max", "min", "prod")),
}

# Gloo's tags are 31-bit. The upper half is for these messages. A tag differs from those of the messages in flight, and
# identifies the operation of the message, so that ranks that call different operations do not take each other's
# messages. The lower half is for the caller's sends and receives.
TAG_RANGE = 1 << 30
_TAGS = TAG_RANGE >> TAG_BITS  # of one operation
_AT_ONCE = datetime.timedelta(milliseconds=1)
_CHANNELS = 8  # exchanges of one process group whose messages have different tags
_UNUSED_TAG = TAG_RANGE + (_CHANNELS - 1 << TAG_BITS)  # of the last channel, which no exchange has


class DirectExchange:
    """Collectives over the messages of one process group.

    Args:
        group: the process group.
        members: those of its ranks that take part, this one among them; None: all.
        channel: below 7. Exchanges of one group in which the same two ranks take part have different channels.
        memory: for what is received and reduced; by default that of the process.
        seconds_left: that a wait for a message may take; None: as long as the group says.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        members: Sequence[int] | None = None,
        channel: int = 0,
        memory: ReceiveMemory = of_process,
        seconds_left: Callable[[], float] | None = None,
    ) -> None:
        self._members = range(group.size()) if members is None else members
        self.rank, self.size = self._members.index(group.rank()), len(self._members)
        self._group = weakref.ref(group)  # this is kept as long as the group is
        self._are_all = group.size() == len(self._members)
        self._tags = itertools.count(channel, _CHANNELS)
        self.memory = memory
        self._seconds_left = seconds_left
        self._all_reduces: deque[_SegmentedAllReduce] = deque()
        """Those in flight, in the order in which they began."""

    def among(self, members: Sequence[int], channel: int) -> DirectExchange:
        """An exchange between some ranks of the group."""
        return DirectExchange(self._live_group(), members, channel, self.memory, self._seconds_left)

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

        # After an exception in a wait, the memory is not given back: it may still be written.
        return Pending(works, finish, (received, chunks))

    def with_mine(self, received: Tensor, mine: Tensor) -> list[Tensor]:
        """The parts of all ranks: ``mine``, and the rows of ``received`` for the others."""
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
        if size * max(self.size, _ONE_SHOT_RANKS) <= _ONE_SHOT_BYTES * _ONE_SHOT_RANKS:
            return self.reduce_scatter(flat, [flat] * self.size, op, operation)
        if self._are_all and op in _OF_GLOO.get(flat.dtype, ()):
            return self._all_reduce_by_gloo(flat, op, operation)
        if self.size == 2 and size <= _ONE_SHOT_BYTES_OF_PAIR:
            return self.reduce_scatter(flat, [flat] * self.size, op, operation)
        return self._all_reduce_in_segments(flat, op, operation)

    def _all_reduce_by_gloo(self, flat: Tensor, op: str, operation: Operation) -> Work:
        group = self._live_group()
        # Gloo adds up whatever the other ranks reduce at the time. These messages check that it is the same operation.
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

        Empty tensors are neither sent nor received. Both sides know which ones are empty, because the sizes are the
        same function of the ranks.
        """
        group = self._live_group()
        # The methods of the process group: the functions of torch.distributed cost several times as much.
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
        """End all waits for messages of the process group with an error, in other threads and on other ranks too.

        Gloo ends them when a wait reaches its time limit. Here a receive that no rank answers does, unless it fails
        earlier because its peer has gone.
        """
        nothing = torch.empty(1, dtype=torch.uint8, device="cpu")
        for peer, rank in enumerate(self._members):
            if peer != self.rank:
                with contextlib.suppress(RuntimeError):
                    self._live_group().recv([nothing], rank, _UNUSED_TAG).wait(_AT_ONCE)

    def _live_group(self) -> dist.ProcessGroup:
        group = self._group()
        assert group is not None
        return group

    def _limited(self, works: list[Any]) -> list[Any]:
        return works if self._seconds_left is None else [_Limited(work, self._seconds_left) for work in works]


class _Limited:
    """A message in flight whose wait has a time limit, which is computed when the wait begins."""

    def __init__(self, work: Any, seconds_left: Callable[[], float]) -> None:
        self._work, self._seconds_left = work, seconds_left
        self.is_completed = work.is_completed

    def wait(self) -> None:
        self._work.wait(max(_AT_ONCE, datetime.timedelta(seconds=self._seconds_left())))


class _SegmentedAllReduce:
    """A two-shot all-reduce with few segments under way at a time, so that it takes little memory.

    Each rank reduces a part of a segment. The parts are gathered while later segments are reduced.
    """

    def __init__(self, exchange: DirectExchange, flat: Tensor, op: str, operation: Operation) -> None:
        self.done = False
        self._exchange, self._op = exchange, op
        self._segments = flat.split(_SEGMENT_BYTES // flat.element_size())
        # Taken now, so that ranks that wait for their collectives in different orders have the same tags.
        self._tags = [[exchange.next_tag(operation) for _ in range(2)] for _ in self._segments]
        count, others = min(_UNDER_WAY, len(self._segments)), exchange.size - 1
        longest = -(-self._segments[0].numel() // exchange.size)
        self._memory = exchange.memory.take(count * others, longest, flat.dtype)
        self._buffers = self._memory.view(count, others, longest)
        self._reducing = deque(self._reduce(number) for number in range(count))
        self._gathering: deque[list[Any]] = deque()
        self._reduced = 0  # segments

    def _reduce(self, number: int) -> tuple[list[Any], list[Tensor]]:
        """Exchange the parts of a segment to be reduced; returns the works, and all ranks' parts for this rank."""
        exchange = self._exchange
        chunks = split_evenly(self._segments[number], exchange.size)
        mine = chunks[exchange.rank]
        parts = exchange.with_mine(self._buffers[number % len(self._buffers), :, : mine.numel()], mine)
        return exchange.exchange(chunks, parts, self._tags[number][0]), parts

    def complete(self) -> None:
        """Wait for all segments. After an error it may be called again."""
        exchange = self._exchange
        while self._reducing:
            works, parts = self._reducing[0]
            _wait_for(works)
            mine = parts[exchange.rank]
            exchange.combine(mine, parts, self._op)
            self._reducing.popleft()
            number, self._reduced = self._reduced, self._reduced + 1
            chunks = split_evenly(self._segments[number], exchange.size)
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
    """Wait for works and remove each from the list, so that none is waited for again if a later one fails."""
    while works:
        works[-1].wait()
        works.pop()


def split_evenly(flat: Tensor, size: int) -> list[Tensor]:
    """Split a vector into ``size`` parts whose lengths differ by one at most."""
    bounds = [flat.numel() * r // size for r in range(size + 1)]
    return [flat[a:b] for a, b in itertools.pairwise(bounds)]
