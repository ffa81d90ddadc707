"""Collectives on the CPU through memory that the ranks share.

[Note: pieces]
    A collective is one *piece* or several. In each, every rank sends one message that all others can read (and of which
    each reads what concerns it), and computes something of all of them. All ranks read the pieces of a lane in one
    order, that of the calls.

[Note: two lanes]
    Most collectives are sent at the call, in one piece or, if a rank sends more than four megabytes, in up to 16: a
    rank that waits needs the others to have called it, too, and no more, so that ranks may do different things
    between the call and the wait. The messages take as much memory as the receive buffers of an exchange by
    messages would: no more than what some rank has called and not waited for, whose tensors that rank holds. A rank
    that waits as soon as it has called sends each of several pieces shortly before it reads those of the others, so
    that all of them are read while they are in the caches.

    Only a rank that has nothing to receive, as the root of a broadcast, could leave behind any number of messages for
    which the others have not called anything yet. Its wait is over at once as long as 256 MiB, over all process groups,
    wait to be received. Beyond that, its wait needs the others to have called the collective, like that of any other
    collective. It does not need them to wait, and a call itself never waits for anything, so nothing stops that would
    go on by messages, which need a receive for each send.

    An all-reduce of more than a megabyte goes over a lane of its own, in many pieces, which are sent and read while
    ranks wait, and stay in the caches on their way. A rank that waits for it needs the others to come to a wait, too,
    as with one by messages.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from .combine import combine
from .direct_exchange import DirectExchange, evenly_cut
from .operation import Operation
from .work import Pending, Work

_LARGEST_BYTES = 1 << 30  # of a message that is sent at the call
_PIECE_BYTES = 1 << 20
_MOST_PIECES = 16  # of a collective that is sent at the call
_AHEAD = 2  # pieces that a rank that waits sends before it reads the first
_RUN_AHEAD_BYTES = 1 << 28  # that others have not received, of what they may not even have called
_CAPACITIES = (16 * _LARGEST_BYTES, 8 * _PIECE_BYTES)
"""Of the exchanges for what is sent at the call and in pieces. Of the first, memory is only taken as far as needed."""
_STAGE_BYTES = 1 << 26
"""Of single messages that a rank has sent, without having waited, and others have not received."""
_EXCHANGES = 3  # those, and the one for messages between two ranks


class Exchange(Protocol):
    """What ``bmt_kernels.SharedMemoryExchange`` does."""

    @property
    def handle(self) -> tuple[int, int, int]: ...

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool: ...

    def wait_for_room(self, size: int) -> None: ...

    def wait_for_others(self, most: int) -> None: ...

    def try_send(self, parts: Sequence[Tensor], operation: int, name: bytes) -> bool: ...

    def reserve(self, size: int) -> int | None: ...

    def reserved(self, place: int, dtype: torch.dtype) -> Tensor: ...

    def send_reserved(self, place: int, operation: int, name: bytes) -> bool: ...

    def give_back(self, place: int) -> None: ...

    def receive(self, sizes: Sequence[int | None], dtype: torch.dtype, operation: int, name: bytes) -> list[Tensor]: ...

    def release(self) -> None: ...

    def abandon(self) -> None: ...

    def stop(self, why: str) -> None: ...


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


@dataclass(eq=False, slots=True)
class _Piece:
    """One message of every rank, and what follows from them.

    Attributes:
        parts: what this rank sends, to lie end to end.
        sizes: the bytes that each rank sends; 0 where this rank does not read them, None where it does not know.
        dtype: of all of it.
        read: called with the ranks' messages as vectors.
        needs: how many pieces of the collective must have been read before ``parts`` are what is to be sent.
        place: where what this rank sends lies already, in place of ``parts``.
        runs_ahead: whether this rank receives nothing, so that it might be long before the others come.
        number, name: of the operation; ranks compare them.
    """

    parts: Sequence[Tensor]
    sizes: Sequence[int | None]
    dtype: torch.dtype
    read: Callable[[list[Tensor]], None]
    needs: int = 0
    place: int | None = None
    runs_ahead: bool = False
    number: int = 0
    name: bytes = b""

    @property
    def sent_bytes(self) -> int:
        """Of this rank's message."""
        return sum(part.nbytes for part in self.parts)


class InterruptedCollectiveError(RuntimeError):
    """An exception has left an earlier collective half done."""


class SharedMemoryCollectives:
    """Collectives between the ranks of one process group, in the same order on all of them.

    Args:
        whole: the exchange for what is sent at the call; connected, like the next.
        pieces: the exchange for what is sent in pieces.
        messages: the exchange for single messages between two ranks; connected.
        direct: for messages that are too large.
    """

    def __init__(self, whole: Exchange, pieces: Exchange, messages: Messages, direct: DirectExchange) -> None:
        self.rank, self.size = direct.rank, direct.size
        self.messages = messages
        self.direct = direct
        self._order = _Order()
        self._whole, self._pieces = _Lane(whole, self._order), _Lane(pieces, self._order)
        self._exchange = whole
        # Of the vectors that :meth:`empty` has made, by their addresses; or vectors themselves that lie in memory of
        # this rank alone, so that nothing else comes to lie there.
        self._places: dict[int, int | Tensor] = {}

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A vector for one :meth:`reduce_scatter`, which sends it without a copy; None: it would be too large.

        Where this rank has no room at the moment, it is copied when it is sent. The others do not notice.
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
        """Every rank's ``mine`` into ``chunks``. ``waits_at_once``: nothing comes between this call and the wait."""
        if mine.nbytes > _LARGEST_BYTES:
            return self._by_messages().all_gather(chunks, mine, operation)
        # All ranks must decide alike, whose own chunks may have other lengths.
        if chunks[0].nbytes <= 4 * _PIECE_BYTES or len({chunk.numel() for chunk in chunks}) > 1:
            return self._whole.start([self._gather(chunks, mine)], operation)
        cuts = zip(_cut_in_few([mine], 1), _cut_in_few(chunks, 1), strict=True)
        return self._whole.start([self._gather(cut, part) for (part,), cut in cuts], operation, waits_at_once)

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        """Reduce ``chunks`` into ``out`` of one rank each."""
        if chunks[0].nbytes * (self.size - 1) > _LARGEST_BYTES:
            return self._by_messages().reduce_scatter(out, chunks, op, operation)
        address = chunks[0].data_ptr()
        if address in self._places:
            return self._whole.start([self._reduce_there(out, chunks, op, self._places.pop(address))], operation)
        if chunks[0].nbytes * (self.size - 1) <= 4 * _PIECE_BYTES or len({chunk.numel() for chunk in chunks}) > 1:
            return self._whole.start([self._reduce(out, chunks, op)], operation)
        cuts = _cut_in_few(chunks, self.size - 1)
        step = cuts[0][0].numel()
        pieces = [self._reduce(part, cut, op) for part, cut in zip(out.split(step), cuts, strict=True)]
        return self._whole.start(pieces, operation, waits_at_once)

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        if flat.nbytes > _LARGEST_BYTES:
            return self._by_messages().broadcast(flat, root, operation)
        nothing = flat[:0]
        chunks = [flat if r == root else nothing for r in range(self.size)]
        piece = self._gather(chunks, chunks[self.rank])
        piece.runs_ahead = self.rank == root
        return self._whole.start([piece], operation)

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        if flat.nbytes <= _PIECE_BYTES:
            return self._whole.start([self._reduce_all(flat, op)], operation)
        if self.size == 2:  # less waiting than in halves, and not more to copy
            return self._pieces.start([self._reduce_all(part, op) for (part,) in _cut_up([flat], 1)], operation)
        chunks = evenly_cut(flat, self.size)
        reducing = [self._reduce(cut[self.rank], cut, op) for cut in _cut_up(chunks, self.size - 1)]
        gathering = [self._gather(cut, cut[self.rank], needs=len(reducing)) for cut in _cut_up(chunks, 1)]
        return self._pieces.start([*reducing, *gathering], operation)

    def reduce(self, flat: Tensor, root: int, op: str, operation: Operation) -> Work:
        """Reduce into ``flat`` of rank ``root``; that of the others is not touched."""
        mine = [] if self.rank == root else [flat]
        return self._send_to(root, mine, flat, partial(self._read_all, flat, op, flat), operation)

    def gather(self, chunks: Sequence[Tensor], mine: Tensor, root: int, operation: Operation) -> Work:
        """Every rank's ``mine`` into ``chunks`` of rank ``root``, whose own is not touched."""
        sent = [] if self.rank == root else [mine]
        return self._send_to(root, sent, mine, partial(self._read_gathered, chunks), operation)

    def _send_to(
        self, root: int, parts: list[Tensor], like: Tensor, read: Callable[[list[Tensor]], None], operation: Operation
    ) -> Work:
        reads = self.rank == root
        sizes = [like.nbytes if reads and rank != root else 0 for rank in range(self.size)]
        piece = _Piece(parts, sizes, like.dtype, read if reads else _ignore, runs_ahead=not reads)
        return self._whole.start([piece], operation)

    def scatter(self, mine: Tensor, chunks: Sequence[Tensor], root: int, operation: Operation) -> Work:
        """Each of ``chunks`` of rank ``root`` into ``mine`` of one rank; that of the root is not touched."""
        if self.rank == root:
            others = [chunk for rank, chunk in enumerate(chunks) if rank != root]
            return self._whole.start([_Piece(others, [0] * self.size, mine.dtype, _ignore, runs_ahead=True)], operation)
        sizes = [mine.nbytes * (self.size - 1) if rank == root else 0 for rank in range(self.size)]
        begin = mine.numel() * (self.rank - (self.rank > root))

        def read(messages: list[Tensor]) -> None:
            mine.copy_(messages[root][begin : begin + mine.numel()])

        return self._whole.start([_Piece([], sizes, mine.dtype, read)], operation)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Operation) -> Work:
        """``inputs[r]`` into ``outputs[this rank]`` of rank r, whose lengths this rank need not know.

        A message begins with the numbers of bytes for each rank.
        """
        ours = [_bytes(tensor) for tensor in inputs]
        lengths = torch.tensor([0 if r == self.rank else len(part) for r, part in enumerate(ours)], device="cpu")
        others = [part for rank, part in enumerate(ours) if rank != self.rank]
        sizes = [0 if rank == self.rank else None for rank in range(self.size)]

        def read(messages: list[Tensor]) -> None:
            for rank, message in enumerate(messages):
                if rank == self.rank:
                    _bytes(outputs[rank]).copy_(ours[rank])
                    continue
                sent = message[: 8 * self.size].clone().view(torch.int64).tolist()
                begin, into = 8 * self.size + sum(sent[: self.rank]), _bytes(outputs[rank])
                if sent[self.rank] != len(into):
                    raise ValueError(
                        f"all_to_all: rank {rank} sends {sent[self.rank]} bytes to rank {self.rank}, "
                        f"whose output takes {len(into)}"
                    )
                into.copy_(message[begin : begin + len(into)])

        return self._whole.start([_Piece([_bytes(lengths), *others], sizes, torch.uint8, read)], operation)

    def send_nothing(self, operation: Operation) -> Work:
        """Let ranks that call anything else than ``operation`` find that this one does not. Needs no waiting."""
        nothing = [0] * self.size
        lanes = (self._whole, self._pieces)
        return Pending(
            [lane.start([_Piece([], nothing, torch.uint8, _ignore)], operation) for lane in lanes], None, None
        )

    def stop(self, why: str) -> None:
        """Let waits, in other threads too, end with an error."""
        for lane in (self._whole, self._pieces):
            lane.stop(why)
        self.messages.stop(why)

    def give_up(self, error: BaseException) -> None:
        """After ``error``, no rank's collective passes for done that needs one of this rank's which is not."""
        self._order.give_up(error)

    def _by_messages(self) -> DirectExchange:
        self._order.check()
        return self.direct

    # --- pieces -----------------------------------------------------------------------------------

    def _gather(self, chunks: Sequence[Tensor], mine: Tensor, needs: int = 0) -> _Piece:
        """Every rank sends its chunk to all. This rank's own is not touched."""
        sizes = [chunk.nbytes for chunk in chunks]
        sizes[self.rank] = 0
        return _Piece([mine], sizes, mine.dtype, partial(self._read_gathered, chunks), needs)

    def _read_gathered(self, chunks: Sequence[Tensor], messages: list[Tensor]) -> None:
        for rank, message in enumerate(messages):
            if rank != self.rank and message.numel():
                chunks[rank].copy_(message)

    def _reduce(self, out: Tensor, chunks: Sequence[Tensor], op: str) -> _Piece:
        """Every rank sends the others their chunks, and reduces its own, which ``out`` may be."""
        others = [chunk for rank, chunk in enumerate(chunks) if rank != self.rank]
        total = sum(chunk.nbytes for chunk in chunks)
        sizes = [total - chunk.nbytes for chunk in chunks]
        sizes[self.rank] = 0
        return _Piece(others, sizes, chunks[0].dtype, partial(self._read_reduced, out, chunks, op))

    def _read_reduced(self, out: Tensor, chunks: Sequence[Tensor], op: str, messages: list[Tensor]) -> None:
        mine = chunks[self.rank]
        parts = messages
        if self.size > 2:  # of two ranks, each sends just what the other reduces
            before = sum(chunk.numel() for chunk in chunks[: self.rank])
            # A rank's message lacks its own chunk.
            begins = [before - chunk.numel() if rank < self.rank else before for rank, chunk in enumerate(chunks)]
            parts = [message[begin : begin + mine.numel()] for message, begin in zip(messages, begins, strict=True)]
        parts[self.rank] = mine.clone() if self.rank > 1 and out.data_ptr() == mine.data_ptr() else mine
        combine(out, parts, op)

    def _reduce_there(self, out: Tensor, chunks: Sequence[Tensor], op: str, place: int | Tensor) -> _Piece:
        """As :meth:`_reduce` does, of chunks that lie in the memory that others read, or have found no room there."""
        sizes = [sum(chunk.nbytes for chunk in chunks)] * self.size
        sizes[self.rank] = 0
        before, mine = sum(chunk.numel() for chunk in chunks[: self.rank]), chunks[self.rank]

        def read(messages: list[Tensor]) -> None:
            parts = [message[before : before + mine.numel()] for message in messages]
            parts[self.rank] = mine
            combine(out, parts, op)

        if isinstance(place, Tensor):
            return _Piece(chunks, sizes, mine.dtype, read)
        return _Piece([], sizes, mine.dtype, read, place=place)

    def _reduce_all(self, flat: Tensor, op: str) -> _Piece:
        """Every rank sends everything to all."""
        sizes = [flat.nbytes] * self.size
        if self.rank < 2:
            sizes[self.rank] = 0  # this rank has it
        return _Piece([flat], sizes, flat.dtype, partial(self._read_all, flat, op, None))

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


def _cut_up(chunks: Sequence[Tensor], together: int, least: int = 0) -> list[list[Tensor]]:
    """Parts of all chunks, so small that as many as go ``together`` make up a piece. A short chunk's last are empty.

    They have ``least`` elements at least, but for the last.
    """
    step = max(1, least, _PIECE_BYTES // (chunks[0].element_size() * together))
    longest = max(chunk.numel() for chunk in chunks)
    return [[chunk[begin : begin + step] for chunk in chunks] for begin in range(0, longest, step)]


def _cut_in_few(chunks: Sequence[Tensor], together: int) -> list[list[Tensor]]:
    """Parts of all chunks, twice as large or larger, for what is sent at the call: there is room for 4096 pieces."""
    numel, itemsize = chunks[0].numel(), chunks[0].element_size()
    return _cut_up(chunks, together, max(-(-numel // _MOST_PIECES), 2 * _PIECE_BYTES // (itemsize * together)))


class _Order:
    """Of the pieces of some lanes, which ends with the first exception that leaves one of them.

    The caller may catch it, and use the tensors for something else. Going on would read what the others have sent for
    the old collective into them, and send the others the new contents for it: ranks would get different results.
    """

    def __init__(self) -> None:
        self._lanes: list[tuple[Exchange, tuple[deque[_Piece], ...]]] = []
        self._end: tuple[type[RuntimeError], str] | None = None

    def add(self, exchange: Exchange, *queues: deque[_Piece]) -> None:
        self._lanes.append((exchange, queues))

    def check(self) -> None:
        """Raise if it has ended."""
        if self._end is not None:
            kind, text = self._end
            raise kind(text)

    def give_up(self, error: BaseException) -> None:
        if self._end is None:
            # Not the exception itself, which holds what the functions have held that it has left.
            kind = RuntimeError if type(error) is RuntimeError else InterruptedCollectiveError
            told = f"{type(error).__name__}: {error}".removesuffix(": ")
            text = "a collective was interrupted in its middle: its result is lost, and so is the order of later ones"
            self._end = kind, f"{text} ({told})"
        for exchange, queues in self._lanes:
            exchange.abandon()  # the others do not wait for what this process, which may live on, does not send
            for queue in queues:
                queue.clear()


class _Lane:
    """An exchange, and the pieces that are to go through it, in the order of the calls."""

    def __init__(self, exchange: Exchange, order: _Order) -> None:
        self._exchange, self._order = exchange, order
        self._unsent: deque[_Piece] = deque()
        self._unread: deque[_Piece] = deque()
        self._started = self._read = 0  # pieces
        order.add(exchange, self._unsent, self._unread)

    def start(self, pieces: Iterable[_Piece], operation: Operation, waits_at_once: bool = False) -> Work:
        """Begin a collective."""
        self._order.check()
        before = self._started
        try:
            for piece in pieces:
                piece.number, piece.name = operation.number, operation.name
                if piece.needs:
                    piece.needs += before
                self._unsent.append(piece)
                self._unread.append(piece)
                self._started += 1
            self._send_ahead(self._read + _AHEAD if waits_at_once else self._started)
        except BaseException as error:
            self._order.give_up(error)
            raise
        return Pending([], partial(self._complete, self._started), None)

    def stop(self, why: str) -> None:
        self._exchange.stop(why)

    def _complete(self, last: int) -> None:
        if self._read >= last:
            return
        self._order.check()
        try:
            while self._read < last:
                piece = self._unread[0]
                if self._unsent:
                    if self._unsent[0] is piece:
                        self._exchange.wait_for_room(piece.sent_bytes)
                    self._send_ahead(self._read + _AHEAD)
                piece.read(self._exchange.receive(piece.sizes, piece.dtype, piece.number, piece.name))
                self._exchange.release()
                self._unread.popleft()
                self._read += 1
                if piece.runs_ahead:
                    self._exchange.wait_for_others(_RUN_AHEAD_BYTES)
            self._send_ahead(self._started)
        except BaseException as error:
            self._order.give_up(error)
            raise

    def _send_ahead(self, last: int) -> None:
        """Send pieces up to number ``last``, as far as there is room."""
        while self._unsent and self._started - len(self._unsent) < last:
            piece = self._unsent[0]
            if piece.needs > self._read or not self._try_send(piece):
                return
            self._unsent.popleft()

    def _try_send(self, piece: _Piece) -> bool:
        if piece.place is not None:
            return self._exchange.send_reserved(piece.place, piece.number, piece.name)
        return self._exchange.try_send(piece.parts, piece.number, piece.name)


_OBSTACLES = (
    "a rank lacks bmt_kernels, or its system cannot share memory",
    "the system of a rank gives it no shared memory",
    "a rank is on another host, in another container or of another user",
)


def connect_shared_memory(
    direct: DirectExchange, ranks: Sequence[int], timeout: datetime.timedelta | Callable[[], float], local_size: int = 0
) -> SharedMemoryCollectives | str:
    """Find the memory of the other ranks, whose global ranks are given.

    A collective; the reason, on all ranks, where one of them cannot. ``timeout`` may be a function that returns
    seconds. ``local_size``: the ranks of the job on this host, if they are more.
    """
    lanes, obstacle, failure = None, 0, None
    try:
        seconds = timeout.total_seconds() if isinstance(timeout, datetime.timedelta) else timeout
        lanes, obstacle = _create(direct.rank, [f"rank {rank}" for rank in ranks], seconds, local_size)
    except Exception as error:  # to be raised when the others know
        failure = error
    exchanges: tuple[Exchange | Messages, ...] = lanes or ()
    told = [exchange.handle for exchange in exchanges] or [(0, 0, 0)] * _EXCHANGES
    mine = torch.tensor(told, device="cpu")
    handles = mine.repeat(direct.size, 1, 1)
    meeting = Operation(0, b"share_memory", 0)
    direct.all_gather([theirs.flatten() for theirs in handles], mine.flatten(), meeting).wait()
    if lanes is not None:
        told_by_all = [[(a, b, c) for a, b, c in handles[:, n].tolist()] for n in range(_EXCHANGES)]
        connected = all(lane.connect(theirs) for lane, theirs in zip(exchanges, told_by_all, strict=True))
        obstacle = len(_OBSTACLES) - (0 if connected else 1)
    least = torch.tensor([obstacle], device="cpu")
    direct.all_reduce(least, "min", meeting).wait()
    if failure is not None:
        raise failure
    if lanes is None or least.item() < len(_OBSTACLES):
        return _OBSTACLES[int(least.item())]
    return SharedMemoryCollectives(*lanes, direct)


def _create(
    rank: int, names: Sequence[str], timeout: float | Callable[[], float], local_size: int
) -> tuple[tuple[Exchange, Exchange, Messages] | None, int]:
    """The exchanges for what is sent at the call, in pieces, and between two ranks; or an obstacle to have them."""
    try:
        from bmt_kernels import SharedMemoryExchange, SharedMemoryMessages
    except ImportError:
        return None, 0
    if not SharedMemoryExchange.available():
        return None, 0
    whole, pieces = _CAPACITIES
    try:
        exchanges = [SharedMemoryExchange(rank, names, capacity, timeout, local_size) for capacity in (whole, pieces)]
        lanes = exchanges[0], exchanges[1], SharedMemoryMessages(rank, names, timeout, _STAGE_BYTES, local_size)
    except OSError:
        return None, 1
    return lanes, len(_OBSTACLES)
