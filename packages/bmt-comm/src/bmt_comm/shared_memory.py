"""Collectives on the CPU through shared memory.

[Note: steps]
    A collective consists of one or more *steps*. In a step, every rank sends one message that all others can read,
    reads the parts of their messages that concern it, and computes a result from them. All ranks read the steps of a
    channel in the order of the calls.

[Note: two channels]
    The *eager* channel carries most collectives. They are sent at the call: in one step, or in up to 16 steps if a rank
    sends more than four megabytes. A rank that waits only needs the others to have called the collective, so ranks may
    do different things between the call and the wait. The messages take as much memory as the receive buffers of an
    exchange by messages would: no more than what some rank has called and not waited for, whose tensors that rank
    holds. If a rank waits as soon as it has called, it sends each of several steps shortly before it reads those of the
    others. All of them are then read while they are in the caches.

    A rank that has nothing to receive, such as the root of a broadcast, could run ahead of the others by any number of
    messages. Its wait returns at once as long as at most 256 MiB, over all process groups, wait to be received. Beyond
    that, its wait needs the others to have called the collective, like the wait for any other collective. It does not
    need them to wait, and a call never blocks. So a program that runs with messages, which need a receive for each
    send, does not hang here.

    The *pipelined* channel carries all-reduces of more than a megabyte, in many steps. They are sent and read while
    ranks wait, and stay in the caches. A rank that waits needs the others to wait, too, as with an all-reduce by
    messages.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .combine import combine
from .direct_exchange import DirectExchange, split_evenly
from .operation import Operation
from .shared_memory_channel import Channel, Exchange, Order, Step
from .work import Pending, Work

_LARGEST_BYTES = 1 << 30  # of a message that is sent at the call
_STEP_BYTES = 1 << 20
_MAX_STEPS = 16  # of a collective that is sent at the call
_CAPACITIES = (16 * _LARGEST_BYTES, 8 * _STEP_BYTES)
"""Of the exchanges of the eager and the pipelined channel. The first takes memory only as far as needed."""
_STAGE_BYTES = 1 << 26
"""Of single messages that a rank has sent, without having waited, and others have not received."""
_EXCHANGES = 3  # those of the two channels, and the one for messages between two ranks


class MessageWork(Work, Protocol):
    """A single message in flight.

    Attributes:
        peer: the other rank; None: any, before it is done.
        error: how it has failed.
    """

    peer: int | None
    error: Exception | None

    def wait(self, timeout: float | None = None) -> None: ...

    def cancel(self, error: Exception) -> None: ...


class Messages(Protocol):
    """What ``bmt_kernels.SharedMemoryMessages`` does."""

    @property
    def handle(self) -> tuple[int, int, int]: ...

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool: ...

    def send(self, data: Tensor, peer: int, tag: int = 0, stage: bool = True) -> MessageWork | None: ...

    def receive(self, data: Tensor, peer: int | None, tag: int = 0) -> MessageWork: ...

    def stop(self, why: str) -> None: ...


class SharedMemoryCollectives:
    """Collectives between the ranks of one process group, in the same order on all of them.

    Args:
        eager: the exchange of the eager channel; connected, as is the next.
        pipelined: the exchange of the pipelined channel.
        messages: the exchange for single messages between two ranks; connected.
        direct: for messages that are too large.
    """

    def __init__(self, eager: Exchange, pipelined: Exchange, messages: Messages, direct: DirectExchange) -> None:
        self.rank, self.size = direct.rank, direct.size
        self.messages = messages
        self.direct = direct
        self._order = Order()
        self._eager, self._pipelined = Channel(eager, self._order), Channel(pipelined, self._order)
        self._exchange = eager
        # By address, the places of the vectors that :meth:`empty` has made. A vector for which there was no room lies
        # in memory of this rank alone; it is kept here itself, so that its address is not used again.
        self._places: dict[int, int | Tensor] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A vector for one :meth:`reduce_scatter`, which sends it without a copy; None: it would be too large.

        If this rank has no room at the moment, the vector is copied when it is sent. The others do not notice.
        """
        size = numel * dtype.itemsize
        if not 0 < size <= _LARGEST_BYTES:
            return None
        place = self._exchange.reserve(size)
        if place is None:
            vector = torch.empty(numel, dtype=dtype, device="cpu")
        else:
            vector = self._exchange.reserved(place, dtype)
        self._places[vector.data_ptr()] = vector if place is None else place
        return vector

    def discard(self, vector: Tensor) -> None:
        """A vector of :meth:`empty` will not be reduced."""
        place = self._places.pop(vector.data_ptr(), None)
        if isinstance(place, int):
            self._exchange.give_back(place)

    def all_gather(
        self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        """Copy every rank's ``mine`` into ``chunks``. ``waits_at_once``: the caller waits right after this call."""
        if mine.nbytes > _LARGEST_BYTES:
            return self._by_messages().all_gather(chunks, mine, operation)
        # All ranks must decide alike, and the lengths of their chunks may differ.
        if chunks[0].nbytes <= 4 * _STEP_BYTES or len({chunk.numel() for chunk in chunks}) > 1:
            return self._eager.start([self._gather(chunks, mine)], operation)
        steps = zip(_split_in_few([mine], 1), _split_in_few(chunks, 1), strict=True)
        return self._eager.start([self._gather(parts, part) for (part,), parts in steps], operation, waits_at_once)

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        """Reduce chunk r of every rank into ``out`` of rank r."""
        if chunks[0].nbytes * (self.size - 1) > _LARGEST_BYTES:
            return self._by_messages().reduce_scatter(out, chunks, op, operation)
        address = chunks[0].data_ptr()
        if address in self._places:
            return self._eager.start([self._reduce_reserved(out, chunks, op, self._places.pop(address))], operation)
        if chunks[0].nbytes * (self.size - 1) <= 4 * _STEP_BYTES or len({chunk.numel() for chunk in chunks}) > 1:
            return self._eager.start([self._reduce(out, chunks, op)], operation)
        split = _split_in_few(chunks, self.size - 1)
        length = split[0][0].numel()
        steps = [self._reduce(part, parts, op) for part, parts in zip(out.split(length), split, strict=True)]
        return self._eager.start(steps, operation, waits_at_once)

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        if flat.nbytes > _LARGEST_BYTES:
            return self._by_messages().broadcast(flat, root, operation)
        nothing = flat[:0]
        chunks = [flat if r == root else nothing for r in range(self.size)]
        step = self._gather(chunks, chunks[self.rank])
        step.runs_ahead = self.rank == root
        return self._eager.start([step], operation)

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        """One-shot up to a megabyte and between two ranks, else two-shot: reduce-scatter and all-gather."""
        if flat.nbytes <= _STEP_BYTES:
            return self._eager.start([self._reduce_all(flat, op)], operation)
        if self.size == 2:  # one-shot: less waiting than two-shot, and not more to copy
            return self._pipelined.start([self._reduce_all(part, op) for (part,) in _split([flat], 1)], operation)
        chunks = split_evenly(flat, self.size)
        reducing = [self._reduce(parts[self.rank], parts, op) for parts in _split(chunks, self.size - 1)]
        gathering = [self._gather(parts, parts[self.rank], needs=len(reducing)) for parts in _split(chunks, 1)]
        return self._pipelined.start([*reducing, *gathering], operation)

    def reduce(self, flat: Tensor, root: int, op: str, operation: Operation) -> Work:
        """Reduce into ``flat`` of rank ``root``; ``flat`` of the others is not written."""
        mine = [] if self.rank == root else [flat]
        return self._send_to(root, mine, flat, partial(self._read_all, flat, op, flat), operation)

    def gather(self, chunks: Sequence[Tensor], mine: Tensor, root: int, operation: Operation) -> Work:
        """Copy every rank's ``mine`` into ``chunks`` of rank ``root``, except its own chunk."""
        sent = [] if self.rank == root else [mine]
        return self._send_to(root, sent, mine, partial(self._read_gathered, chunks), operation)

    def _send_to(
        self, root: int, parts: list[Tensor], like: Tensor, read: Callable[[list[Tensor]], None], operation: Operation
    ) -> Work:
        reads = self.rank == root
        sizes = [like.nbytes if reads and rank != root else 0 for rank in range(self.size)]
        step = Step(parts, sizes, like.dtype, read if reads else _ignore, runs_ahead=not reads)
        return self._eager.start([step], operation)

    def scatter(self, mine: Tensor, chunks: Sequence[Tensor], root: int, operation: Operation) -> Work:
        """Copy chunk r of rank ``root`` into ``mine`` of rank r, except that of the root."""
        if self.rank == root:
            others = [chunk for rank, chunk in enumerate(chunks) if rank != root]
            return self._eager.start([Step(others, [0] * self.size, mine.dtype, _ignore, runs_ahead=True)], operation)
        sizes = [mine.nbytes * (self.size - 1) if rank == root else 0 for rank in range(self.size)]
        begin = mine.numel() * (self.rank - (self.rank > root))

        def read(messages: list[Tensor]) -> None:
            mine.copy_(messages[root][begin : begin + mine.numel()])

        return self._eager.start([Step([], sizes, mine.dtype, read)], operation)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Operation) -> Work:
        """Copy ``inputs[r]`` into ``outputs[this rank]`` of every other rank r, of which no lengths need to be known.

        A message begins with the numbers of bytes for each rank.
        """
        ours = [_bytes(tensor) for tensor in inputs]
        lengths = torch.tensor([0 if r == self.rank else len(part) for r, part in enumerate(ours)], device="cpu")
        others = [part for rank, part in enumerate(ours) if rank != self.rank]
        sizes = [0 if rank == self.rank else None for rank in range(self.size)]

        def read(messages: list[Tensor]) -> None:
            for rank, message in enumerate(messages):
                if rank == self.rank:
                    continue
                sent = message[: 8 * self.size].clone().view(torch.int64).tolist()
                begin, into = 8 * self.size + sum(sent[: self.rank]), _bytes(outputs[rank])
                if sent[self.rank] != len(into):
                    raise ValueError(
                        f"all_to_all: rank {rank} sends {sent[self.rank]} bytes to rank {self.rank}, "
                        f"whose output takes {len(into)}"
                    )
                into.copy_(message[begin : begin + len(into)])

        return self._eager.start([Step([_bytes(lengths), *others], sizes, torch.uint8, read)], operation)

    def send_nothing(self, operation: Operation) -> Work:
        """Send an empty step, so that ranks that call anything else than ``operation`` fail. Needs no waiting."""
        nothing = [0] * self.size
        channels = (self._eager, self._pipelined)
        return Pending(
            [channel.start([Step([], nothing, torch.uint8, _ignore)], operation) for channel in channels], None, None
        )

    def stop(self, why: str) -> None:
        """End all waits, in other threads too, with an error."""
        for channel in (self._eager, self._pipelined):
            channel.stop(why)
        self.messages.stop(why)

    def fail(self, error: BaseException) -> None:
        """After ``error``, collectives that are not done fail, on every rank that needs a message of this one."""
        self._order.fail(error)

    def _by_messages(self) -> DirectExchange:
        self._order.check()
        return self.direct

    # --- steps ------------------------------------------------------------------------------------

    def _gather(self, chunks: Sequence[Tensor], mine: Tensor, needs: int = 0) -> Step:
        """Every rank sends its chunk to all. This rank does not write its own chunk."""
        sizes = [chunk.nbytes for chunk in chunks]
        sizes[self.rank] = 0
        return Step([mine], sizes, mine.dtype, partial(self._read_gathered, chunks), needs)

    def _read_gathered(self, chunks: Sequence[Tensor], messages: list[Tensor]) -> None:
        for rank, message in enumerate(messages):
            if rank != self.rank and message.numel():
                chunks[rank].copy_(message)

    def _reduce(self, out: Tensor, chunks: Sequence[Tensor], op: str) -> Step:
        """Every rank sends the others their chunks, and reduces its own chunk, which ``out`` may be."""
        others = [chunk for rank, chunk in enumerate(chunks) if rank != self.rank]
        total = sum(chunk.nbytes for chunk in chunks)
        sizes = [total - chunk.nbytes for chunk in chunks]
        sizes[self.rank] = 0
        return Step(others, sizes, chunks[0].dtype, partial(self._read_reduced, out, chunks, op))

    def _read_reduced(self, out: Tensor, chunks: Sequence[Tensor], op: str, messages: list[Tensor]) -> None:
        mine = chunks[self.rank]
        parts = messages
        if self.size > 2:  # between two ranks, a message is just what the other rank reduces
            before = sum(chunk.numel() for chunk in chunks[: self.rank])
            # A rank's message lacks the chunk of that rank.
            begins = [before - chunk.numel() if rank < self.rank else before for rank, chunk in enumerate(chunks)]
            parts = [message[begin : begin + mine.numel()] for message, begin in zip(messages, begins, strict=True)]
        parts[self.rank] = mine.clone() if self.rank > 1 and out.data_ptr() == mine.data_ptr() else mine
        combine(out, parts, op)

    def _reduce_reserved(self, out: Tensor, chunks: Sequence[Tensor], op: str, place: int | Tensor) -> Step:
        """As :meth:`_reduce`, for chunks of a vector that :meth:`empty` has made."""
        sizes = [sum(chunk.nbytes for chunk in chunks)] * self.size
        sizes[self.rank] = 0
        before, mine = sum(chunk.numel() for chunk in chunks[: self.rank]), chunks[self.rank]

        def read(messages: list[Tensor]) -> None:
            parts = [message[before : before + mine.numel()] for message in messages]
            parts[self.rank] = mine
            combine(out, parts, op)

        if isinstance(place, Tensor):
            return Step(chunks, sizes, mine.dtype, read)
        return Step([], sizes, mine.dtype, read, place=place)

    def _reduce_all(self, flat: Tensor, op: str) -> Step:
        """One-shot: every rank sends everything to all."""
        sizes = [flat.nbytes] * self.size
        if self.rank < 2:
            sizes[self.rank] = 0  # this rank has it
        return Step([flat], sizes, flat.dtype, partial(self._read_all, flat, op, None))

    def _read_all(self, flat: Tensor, op: str, mine: Tensor | None, messages: list[Tensor]) -> None:
        if self.rank < 2:
            messages[self.rank] = flat  # it has not changed since
        elif mine is not None:
            messages[self.rank] = mine.clone()
        combine(flat, messages, op)


def _ignore(messages: list[Tensor]) -> None:
    """What the others have sent does not concern this rank."""


def _bytes(flat: Tensor) -> Tensor:
    return flat.view(torch.uint8)


def _split(chunks: Sequence[Tensor], together: int, least: int = 0) -> list[list[Tensor]]:
    """For each step, a part of every chunk; the last parts of a short chunk are empty.

    The length of a part is such that ``together`` parts have 1 MiB, but ``least`` elements at least.
    """
    length = max(1, least, _STEP_BYTES // (chunks[0].element_size() * together))
    longest = max(chunk.numel() for chunk in chunks)
    return [[chunk[begin : begin + length] for chunk in chunks] for begin in range(0, longest, length)]


def _split_in_few(chunks: Sequence[Tensor], together: int) -> list[list[Tensor]]:
    """As :func:`_split`, with parts at least twice as large: the eager channel has room for 4096 steps."""
    numel, itemsize = chunks[0].numel(), chunks[0].element_size()
    return _split(chunks, together, max(-(-numel // _MAX_STEPS), 2 * _STEP_BYTES // (itemsize * together)))


_OBSTACLES = (
    "a rank lacks bmt_kernels, or its system cannot share memory",
    "the system of a rank gives it no shared memory",
    "a rank is on another host, in another container or of another user",
)


def connect_shared_memory(
    direct: DirectExchange, ranks: Sequence[int], timeout: datetime.timedelta | Callable[[], float], local_size: int = 0
) -> SharedMemoryCollectives | str:
    """Connect to the memory of the other ranks, whose global ranks are ``ranks``.

    A collective. If one rank cannot connect, all ranks return the reason. ``timeout`` may be a function that returns
    seconds. ``local_size``: the ranks of the job on this host, if they are more.
    """
    exchanges, obstacle, failure = None, 0, None
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        exchanges, obstacle = _create(direct.rank, [f"rank {rank}" for rank in ranks], seconds, local_size)
    except Exception as error:  # to be raised when the others know
        failure = error
    created: tuple[Exchange | Messages, ...] = exchanges or ()
    handles = [exchange.handle for exchange in created] or [(0, 0, 0)] * _EXCHANGES
    mine = torch.tensor(handles, device="cpu")
    gathered = mine.repeat(direct.size, 1, 1)  # (ranks, exchanges, 3)
    meeting = Operation(0, b"share_memory", 0)
    direct.all_gather([theirs.flatten() for theirs in gathered], mine.flatten(), meeting).wait()
    if exchanges is not None:
        by_exchange = [[(a, b, c) for a, b, c in gathered[:, n].tolist()] for n in range(_EXCHANGES)]
        connected = all(exchange.connect(theirs) for exchange, theirs in zip(created, by_exchange, strict=True))
        obstacle = len(_OBSTACLES) - (0 if connected else 1)
    least = torch.tensor([obstacle], device="cpu")
    direct.all_reduce(least, "min", meeting).wait()
    if failure is not None:
        raise failure
    if exchanges is None or least.item() < len(_OBSTACLES):
        return _OBSTACLES[int(least.item())]
    return SharedMemoryCollectives(*exchanges, direct)


def _create(
    rank: int, names: Sequence[str], timeout: float | Callable[[], float], local_size: int
) -> tuple[tuple[Exchange, Exchange, Messages] | None, int]:
    """The exchanges of the eager and the pipelined channel, and for messages between two ranks; or an obstacle."""
    try:
        from bmt_kernels import SharedMemoryExchange, SharedMemoryMessages
    except ImportError:
        return None, 0
    if not SharedMemoryExchange.available():
        return None, 0
    try:
        eager, pipelined = (
            SharedMemoryExchange(rank, names, capacity, timeout, local_size) for capacity in _CAPACITIES
        )
        messages = SharedMemoryMessages(rank, names, timeout, _STAGE_BYTES, local_size)
    except OSError:
        return None, 1
    return (eager, pipelined, messages), len(_OBSTACLES)
