"""Collectives on the CPU through memory that the ranks share.

[Note: pieces]
    A collective is one *piece* or several. In each, every rank sends one message that all others can read (and of which
    each reads what concerns it), and computes something of all of them. Messages have slots in the shared memory, a
    few of which are used again and again, so that what is read is still in the caches. All ranks read the pieces of a
    lane in one order, that of the calls.

[Note: two lanes]
    What fits into one message is sent at the call: a rank that waits needs the others to have called it, too, and no
    more. (There are slots for 240 calls that somebody has not waited for.) A long all-reduce goes over a lane of its
    own, piece by piece, while ranks wait: there a rank that waits needs the others to come to a wait, as with an
    all-reduce in halves by messages. Other long collectives would be faster over shared memory, too, but must not
    depend on that: somebody may wait for them while another rank, in the middle of something else, has only called
    them. They go by messages, which the backend's threads move.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .combine import combine
from .direct_exchange import DirectExchange, evenly_cut
from .work import Pending, Work

_SLOTS = (240, 8)
"""Of the exchanges for short and for long collectives."""


class Exchange(Protocol):
    """What ``bmt_kernels.SharedMemoryExchange`` does."""

    @property
    def handle(self) -> tuple[int, int, int]: ...

    @property
    def slot_bytes(self) -> int: ...

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool: ...

    def has_room(self) -> bool: ...

    def wait_for_room(self) -> None: ...

    def send(self, parts: Sequence[Tensor]) -> None: ...

    def receive(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]: ...

    def release(self) -> None: ...


@dataclass(eq=False)
class _Piece:
    """One message of every rank, and what follows from them.

    Attributes:
        parts: what this rank sends, to lie end to end.
        sizes: the bytes that each rank sends.
        dtype: of all of it.
        read: called with the ranks' messages as vectors.
        needs: how many pieces of the collective must have been read before ``parts`` are what is to be sent.
    """

    parts: Sequence[Tensor]
    sizes: Sequence[int]
    dtype: torch.dtype
    read: Callable[[list[Tensor]], None]
    needs: int = 0


class SharedMemoryCollectives:
    """Collectives between the ranks of one process group, in the same order on all of them.

    Args:
        short: the exchange for what fits into one message; connected, like the next.
        long: the exchange for what does not.
        direct: for what has to go by messages of the process group.
    """

    def __init__(self, short: Exchange, long: Exchange, direct: DirectExchange) -> None:
        self.rank, self.size = direct.rank, direct.size
        self._short, self._long, self._direct = _Lane(short), _Lane(long), direct

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor) -> Work:
        if mine.nbytes > self._short.slot_bytes:
            return self._direct.all_gather(chunks, mine)
        return self._short.start(self._gather(chunks, mine), (chunks, mine))

    def reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str) -> Work:
        if out.nbytes * (self.size - 1) > self._short.slot_bytes:
            return self._direct.reduce_scatter(out, chunks, op)
        return self._short.start(self._reduce(out, chunks, op), (out, chunks))

    def broadcast(self, flat: Tensor, root: int) -> Work:
        if flat.nbytes > self._short.slot_bytes:
            return self._direct.broadcast(flat, root)
        nothing = flat[:0]
        chunks = [flat if r == root else nothing for r in range(self.size)]
        return self._short.start(self._gather(chunks, chunks[self.rank]), flat)

    def all_reduce(self, flat: Tensor, op: str) -> Work:
        if flat.nbytes <= self._short.slot_bytes:
            return self._short.start(self._reduce_all(flat, op), flat)
        if self.size == 2:  # less waiting than in halves, and not more to copy
            return self._long.start(self._reduce_all(flat, op), flat)
        chunks = evenly_cut(flat, self.size)
        mine = chunks[self.rank]
        reducing = list(self._reduce(mine, chunks, op))
        return self._long.start([*reducing, *self._gather(chunks, mine, needs=len(reducing))], flat)

    # --- pieces -----------------------------------------------------------------------------------

    def _gather(self, chunks: Sequence[Tensor], mine: Tensor, needs: int = 0) -> Iterator[_Piece]:
        """Every rank sends its chunk to all. This rank's own is not touched."""
        for span in self._spans(chunks, 1):
            into = [chunk[span] for chunk in chunks]
            parts = [mine[span]] if into[self.rank].numel() else []
            yield _Piece(parts, [c.nbytes for c in into], mine.dtype, partial(self._read_gathered, into), needs)

    def _read_gathered(self, into: Sequence[Tensor], messages: list[Tensor]) -> None:
        for rank, message in enumerate(messages):
            if rank != self.rank and message.numel():
                into[rank].copy_(message)

    def _reduce(self, out: Tensor, chunks: Sequence[Tensor], op: str) -> Iterator[_Piece]:
        """Every rank sends the others their chunks, and reduces its own, which ``out`` may be."""
        for span in self._spans(chunks, self.size - 1):
            cut = [chunk[span] for chunk in chunks]
            parts = [part for rank, part in enumerate(cut) if rank != self.rank]
            total = sum(part.nbytes for part in cut)
            sizes = [total - part.nbytes for part in cut]
            yield _Piece(parts, sizes, out.dtype, partial(self._read_reduced, out[span], cut, op))

    def _read_reduced(self, out: Tensor, cut: Sequence[Tensor], op: str, messages: list[Tensor]) -> None:
        mine = cut[self.rank]
        before = sum(part.numel() for part in cut[: self.rank])
        parts = []
        for rank, message in enumerate(messages):
            # A rank's message lacks its own chunk.
            begin = before - cut[rank].numel() if rank < self.rank else before
            parts.append(message[begin : begin + mine.numel()])
        parts[self.rank] = mine if self.rank < 2 else mine.clone()
        combine(out, parts, op)

    def _reduce_all(self, flat: Tensor, op: str) -> Iterator[_Piece]:
        """Every rank sends everything to all."""
        for span in self._spans([flat], 1):
            part = flat[span]
            yield _Piece([part], [part.nbytes] * self.size, flat.dtype, partial(self._read_all, part, op))

    def _read_all(self, part: Tensor, op: str, messages: list[Tensor]) -> None:
        if self.rank < 2:
            messages[self.rank] = part  # it has not changed since
        combine(part, messages, op)

    def _spans(self, chunks: Sequence[Tensor], together: int) -> Iterator[slice]:
        """Cuts chunks so that as many as go ``together`` fit into a slot."""
        step = self._short.slot_bytes // (chunks[0].element_size() * together)
        if step == 0:
            raise ValueError(f"{self.size} ranks are too many for messages of {self._short.slot_bytes} bytes")
        for begin in range(0, max(chunk.numel() for chunk in chunks), step):
            yield slice(begin, begin + step)


class _Lane:
    """An exchange, and the pieces that are to go through it, in the order of the calls."""

    def __init__(self, exchange: Exchange) -> None:
        self.slot_bytes = exchange.slot_bytes
        self._exchange = exchange
        self._unsent: deque[_Piece] = deque()
        self._unread: deque[_Piece] = deque()
        self._started = self._read = 0  # pieces

    def start(self, pieces: Iterable[_Piece], keep: object) -> Work:
        """Begin a collective, which keeps tensors until it is done."""
        before = self._started
        for piece in pieces:
            if piece.needs:
                piece.needs += before
            self._unsent.append(piece)
            self._unread.append(piece)
            self._started += 1
        self._send_ahead()
        return Pending([], partial(self._complete, self._started), keep)

    def _complete(self, last: int) -> None:
        while self._read < last:
            piece = self._unread[0]
            if self._unsent and self._unsent[0] is piece:
                self._exchange.wait_for_room()
            self._send_ahead()
            piece.read(self._exchange.receive(piece.sizes, piece.dtype))
            self._exchange.release()
            self._unread.popleft()
            self._read += 1

    def _send_ahead(self) -> None:
        while self._unsent and self._unsent[0].needs <= self._read and self._exchange.has_room():
            self._exchange.send(self._unsent[0].parts)
            self._unsent.popleft()


def connect_shared_memory(
    direct: DirectExchange, ranks: Sequence[int], timeout: datetime.timedelta
) -> SharedMemoryCollectives | None:
    """Find the memory of the other ranks, whose global ranks are given.

    A collective; ``None``, on all ranks, where one of them cannot.
    """
    lanes = _create(direct.rank, [f"rank {rank}" for rank in ranks], timeout.total_seconds())
    mine = torch.tensor([(0, 0, 0)] * len(_SLOTS) if lanes is None else [lane.handle for lane in lanes])
    handles = mine.repeat(direct.size, 1, 1)
    direct.all_gather([theirs.flatten() for theirs in handles], mine.flatten()).wait()
    connected = lanes is not None and all(
        lane.connect([(a, b, c) for a, b, c in handles[:, n].tolist()]) for n, lane in enumerate(lanes)
    )
    agreed = torch.tensor([int(connected)])
    direct.all_reduce(agreed, "min").wait()
    return None if lanes is None or not agreed.item() else SharedMemoryCollectives(*lanes, direct)


def _create(rank: int, names: Sequence[str], timeout: float) -> tuple[Exchange, Exchange] | None:
    """The exchanges for short and for long collectives, where this process can share memory."""
    try:
        from bmt_kernels import SharedMemoryExchange
    except ImportError:
        return None
    if not SharedMemoryExchange.available():
        return None
    short, long = _SLOTS
    try:
        return SharedMemoryExchange(rank, names, short, timeout), SharedMemoryExchange(rank, names, long, timeout)
    except OSError:  # the system gives no such memory
        return None
