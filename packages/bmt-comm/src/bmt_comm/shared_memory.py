"""Collectives on the CPU through memory that the ranks share.

[Note: pieces]
    Every collective is cut into *pieces*. In each, every rank sends one message that all others can read (and of which
    each reads what concerns it), and computes something of all of them. Messages have a few slots in the shared
    memory, so that what is read is still in the caches. All ranks read the pieces of all collectives in one order,
    that of the calls. They are sent at the call as far as there are slots, and from then on whenever a rank waits for
    any of its collectives.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .combine import combine
from .direct_exchange import evenly_cut
from .work import Pending, Work

if TYPE_CHECKING:
    from .communicator import Communicator


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
        exchange: connected.
        rank: this rank's place.
        size: the number of ranks, two at least.
    """

    def __init__(self, exchange: Exchange, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._exchange = exchange
        self._unsent: deque[_Piece] = deque()
        self._unread: deque[_Piece] = deque()
        self._started = self._read = 0  # pieces

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor) -> Work:
        return self._start(self._gather(chunks, mine), (chunks, mine))

    def reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str) -> Work:
        return self._start(self._reduce(out, chunks, op), (out, chunks))

    def broadcast(self, flat: Tensor, root: int) -> Work:
        nothing = flat[:0]
        chunks = [flat if r == root else nothing for r in range(self.size)]
        return self._start(self._gather(chunks, chunks[self.rank]), flat)

    def all_reduce(self, flat: Tensor, op: str) -> Work:
        if self.size == 2 or flat.nbytes <= self._exchange.slot_bytes:  # less waiting, and not more to copy
            return self._start(self._reduce_all(flat, op), flat)
        chunks = evenly_cut(flat, self.size)
        mine = chunks[self.rank]
        reducing = list(self._reduce(mine, chunks, op))
        return self._start([*reducing, *self._gather(chunks, mine, needs=len(reducing))], flat)

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
        step = self._exchange.slot_bytes // (chunks[0].element_size() * together)
        if step == 0:
            raise ValueError(f"{self.size} ranks are too many for messages of {self._exchange.slot_bytes} bytes")
        for begin in range(0, max(chunk.numel() for chunk in chunks), step):
            yield slice(begin, begin + step)

    # --- the order of pieces ----------------------------------------------------------------------

    def _start(self, pieces: Iterable[_Piece], keep: object) -> Work:
        before = self._started
        for piece in pieces:
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


def connect_shared_memory(comm: Communicator, timeout: datetime.timedelta) -> SharedMemoryCollectives | None:
    """Find the other ranks' memory. A collective; ``None``, on all ranks, where one of them cannot."""
    exchange = _create(comm, timeout)
    mine = torch.tensor((0, 0, 0) if exchange is None else exchange.handle)
    handles = mine.new_empty(comm.size, 3)
    comm.all_gather(handles, mine)
    connected = exchange is not None and exchange.connect([(a, b, c) for a, b, c in handles.tolist()])
    agreed = torch.tensor(int(connected))
    comm.all_reduce(agreed, "min")
    if exchange is None or not agreed.item():
        return None
    return SharedMemoryCollectives(exchange, comm.rank, comm.size)


def _create(comm: Communicator, timeout: datetime.timedelta) -> Exchange | None:
    try:
        from bmt_kernels import SharedMemoryExchange
    except ImportError:
        return None
    if not SharedMemoryExchange.available():
        return None
    names = [f"rank {rank}" for rank in comm.ranks]
    try:
        return SharedMemoryExchange(comm.rank, names, timeout.total_seconds())
    except OSError:  # the system gives no such memory
        return None
