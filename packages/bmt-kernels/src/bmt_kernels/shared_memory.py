"""Messages between processes of one host, through memory that they share.

[Note: memory of messages]
    Each process owns anonymous memory that the others map, too. Only the owner writes to it: messages, a table of their
    places and operations, and two counters. ``sent`` is the number of messages that the owner has written; ``received``
    is the number of messages that it has received *from every process*. So the place of a message is free once all
    processes have received it. A message takes the first place that is large enough: as long as the others keep up, all
    messages lie in the same few pages, which stay in the caches, and no further memory is taken.

    The memory of messages that all processes have received is released to the system, beyond what the process keeps,
    when it sends again in this exchange, or sends a large message in any of its exchanges. All exchanges of a process
    together keep 128 MiB, because new pages cost more than the copy of a message. Each may keep an equal part; an
    exchange that keeps more releases memory when another one needs its part.

    A wait for a counter polls it for a moment and then sleeps on it (a futex). So messages need no thread that would
    have to be scheduled first, and a message that has arrived costs no system call.

    Processes open each other's memory by ``/proc/<process>/fd``, and verify it by a random number in it. It has no name
    in any file system, so nothing is left behind even if processes are killed. If memory cannot be mapped (another host
    or container, another user, another system), :meth:`SharedMemoryExchange.connect` returns False.
"""

from __future__ import annotations

import functools
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _native
from bmt_kernels.message_places import MOST_MESSAGES, MessagePlaces, pages
from bmt_kernels.process_memory import (
    CLOSED,
    ENTRY,
    HEADER,
    MASK,
    NAME,
    RECEIVED,
    SENT,
    TABLE,
    close,
    open_all,
    own_memory,
)
from bmt_kernels.processors import processors

_SMALL = 1 << 14  # bytes
SPIN = 100e-6  # seconds: longer than waking up takes
_SLEEP = 0.1  # seconds after which a wait checks that the other process is alive
_POLL = 1e-3  # seconds between two looks at what is under way in exchanges between two processes

# Exchanges of messages between two processes. Waits for anything else make progress in them.
exchanges_between_two: weakref.WeakSet[Any] = weakref.WeakSet()
_adding = threading.Lock()


def _renew() -> None:
    """Replace the lock, which another thread may have held when this process was forked."""
    global _adding
    _adding = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew)


def members(exchanges: weakref.WeakSet[Any]) -> list[Any]:
    """The members of a set of exchanges to which another thread may add; see :func:`add_exchange`."""
    with _adding:
        return list(exchanges)


def add_exchange(exchanges: weakref.WeakSet[Any], exchange: Any) -> None:
    """Add to a set that other threads may iterate over."""
    with _adding:
        exchanges.add(exchange)


class MismatchError(RuntimeError):
    """Processes exchange messages that do not belong together."""


class SharedMemoryExchange:
    """Messages between the processes of one host: each goes to all of them.

    All processes send and receive the same number of messages, in the same order. There is room for 4096 messages, and
    ``capacity`` bytes, that some process has not received.

    A large message is best written in place: :meth:`reserve` returns a place, and :meth:`send_reserved` sends the
    message from there without a copy.

    A message may have the number and the name of the operation that it belongs to. Each process compares those of the
    others with those of its own message. Those of an empty message, which is not waited for, are compared once it has
    arrived.

    Args:
        rank: this process's place among the processes.
        names: of the processes, for messages of errors.
        capacity: in bytes, the same for all processes. Memory is taken of what is in use.
        timeout: seconds that this process waits for another, or a function that returns them.
        local_size: how many processes share the processors of this host, if they are more than have ``names``.

    Raises:
        OSError: the system does not give such memory.
        RuntimeError: :meth:`available` is false.
        ValueError: ``rank`` or ``capacity`` is out of range.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[str],
        capacity: int,
        timeout: float | Callable[[], float] = 1800.0,
        local_size: int = 0,
    ) -> None:
        if not self.available():
            raise RuntimeError("shared memory needs Linux and the compiled module of bmt-kernels; see build_info()")
        if not 0 <= rank < len(names):
            raise ValueError(f"rank={rank} must be the place of one of the {len(names)} names")
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be a positive number of bytes")
        self.rank, self.names, self.timeout = rank, tuple(names), timeout
        self.capacity = pages(capacity)
        own, self.handle = own_memory(self.capacity)
        """The handle by which other processes map this one's memory: three integers below 2⁶²."""
        self._memories, self._own_address = {rank: own}, own.address
        assert _native.cpu_module is not None
        self._counter_set, self._counter_wait = _native.cpu_module.counter_set, _native.cpu_module.counter_wait
        self._copy = _native.cpu_module.copy
        self._make_tables = _native.cpu_module.Tables
        self._tables = self._make_tables(0, [own.address])
        self._sent = self._received = 0
        exchange = weakref.ref(self)  # a cycle would keep the memory for a while

        def is_received(number: int) -> bool:
            living = exchange()
            return living is not None and living._all_have_received(number)

        self._places = MessagePlaces(self.capacity, is_received, own.give_back)
        # Empty messages that have not arrived yet, by rank: their numbers, and the operations they must belong to.
        self._uncompared: dict[int, deque[tuple[int, int, bytes]]] = {}
        self._stopped = ""  # why this process does not wait any more
        self._late: set[int] = set()  # ranks for which a wait has timed out: it does not wait for them again
        # If processes outnumber processors, the other process may need the processor of the one that polls.
        self._spin = SPIN if max(len(names), local_size) <= processors() else 0.0
        # Not at exit: others notice the end of a process, and messages may still be sent until then.
        weakref.finalize(self, close, own, *self.handle[:2]).atexit = False

    @staticmethod
    def available() -> bool:
        """Whether this system and this build of the package can share memory at all."""
        module = _native.cpu_module
        needed = [(module, "counter_wait"), (os, "memfd_create"), (os, "pidfd_open"), (mmap, "MADV_REMOVE")]
        return all(hasattr(owner, name) for owner, name in needed)

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool:
        """Map the memory of all processes, whose handles are given by rank; returns whether that has worked.

        It must have worked for every process before any of them sends.
        """
        memories = open_all(self._memories[self.rank], self.rank, handles, self.capacity)
        if memories is None:
            return False
        self._memories = memories
        self._tables = self._make_tables(self.rank, [memory.address for memory in self._memories.values()])
        return True

    def has_room(self, size: int) -> bool:
        """Whether a message of ``size`` bytes may be sent now."""
        return self._places.has_room(size)

    def wait_for_room(self, size: int) -> None:
        """Wait until all processes have received so many messages that one of ``size`` bytes may be sent.

        Raises:
            RuntimeError: a process has gone, or has not received them in time.
            ValueError: there can never be so much room.
        """
        self._check_size(size)
        while not self.has_room(size):
            oldest = self._places.oldest()
            if oldest is None:
                if self._places.has_reserved:
                    raise RuntimeError(f"reserved places leave no room for a message of {size} bytes")
                continue
            for rank in self._memories:
                self._wait(rank, RECEIVED, oldest)

    def wait_for_others(self, most: int) -> None:
        """Wait until each process has sent as many messages as this one has received, empty ones among them.

        It does so only if more than ``most`` bytes of messages have not been received by all, in all exchanges of this
        process.

        Raises:
            RuntimeError: a process has gone, or has not sent them in time.
        """
        if MessagePlaces.free_in_all() <= most:
            return
        for rank in self._memories:
            if rank != self.rank:
                self._wait(rank, SENT, self._received)

    def send(self, parts: Sequence[Tensor], operation: int = 0, name: bytes = b"") -> None:
        """Send the next message: ``parts`` (CPU, one-dimensional, of one dtype), end to end.

        ``operation`` and ``name`` say what it belongs to; the first 96 bytes of the name travel.

        Raises:
            ValueError: they are longer than ``capacity``.
            RuntimeError: there is no room.
        """
        if not self.try_send(parts, operation, name):
            raise RuntimeError("there is no room for another message; call wait_for_room first")

    def try_send(self, parts: Sequence[Tensor], operation: int = 0, name: bytes = b"") -> bool:
        """:meth:`send` if there is room; whether there was."""
        size = 0
        for part in parts:
            size += part.nbytes
        self._check_size(size)
        place = self._places.reserve(size)
        if place is None:
            return False
        own, begin = self._memories[self.rank], place
        try:
            for part in parts:
                nbytes = part.nbytes
                # A call of torch costs more than the copy, but negates and conjugates what is to be so when it is read.
                if nbytes <= _SMALL and part.is_contiguous() and not part.is_neg() and not part.is_conj():
                    self._copy(self._own_address + HEADER + begin, part.data_ptr(), nbytes)
                else:
                    own.message(begin, nbytes, part.dtype).copy_(part.detach().reshape(-1))
                begin += nbytes
        except BaseException:
            self._places.release(place)
            raise
        return self._publish(place, size, operation, name)

    def _publish(self, place: int, size: int, operation: int, name: bytes) -> bool:
        """Send the message at a place; returns whether there was room in the table of messages."""
        number = self._sent + 1
        if not self._places.put(place, number):
            return False
        self._memories[self.rank].describe(self._entry(number), place, size, number, operation, _padded(name))
        self._sent = number
        self._set(SENT, number)
        return True

    def reserve(self, size: int) -> int | None:
        """A place where a message of ``size`` bytes can be written, to be sent by :meth:`send_reserved`, if any."""
        self._check_size(size)
        return self._places.reserve(size)

    def reserved(self, place: int, dtype: torch.dtype) -> Tensor:
        """The memory at a reserved place, as a vector of ``dtype``. It may be written until it is sent."""
        return self._memories[self.rank].message(place, self._places.size_of(place), dtype)

    def send_reserved(self, place: int, operation: int = 0, name: bytes = b"") -> bool:
        """Send the message at a reserved place; returns whether there was room in the table of messages.

        The place may be reused once all processes have received the message.
        """
        return self._publish(place, self._places.size_of(place), operation, name)

    def give_back(self, place: int) -> None:
        """Release a reserved place."""
        self._places.release(place)

    def receive(
        self, sizes: Sequence[int | None], dtype: torch.dtype, operation: int = 0, name: bytes = b""
    ) -> list[Tensor]:
        """Every process's next message, by rank: vectors of ``dtype`` with as many bytes as ``sizes`` says.

        None stands for as many as it has. A message whose size is given as 0 may have more, which are not read.

        They lie in the shared memory: they are not to be written, nor read after :meth:`release`, which must be
        called before the next ``receive``. Processes whose messages are empty are not waited for.

        Raises:
            MismatchError: a process has sent a message of another operation or size. The message stays the next one.
            RuntimeError: a process has gone, or has not sent its message in time.
        """
        number = self._received + 1
        entry = self._entry(number)
        name = _padded(name)
        if not self._uncompared:  # if all messages are there, or come soon
            places = self._tables.receive(sizes, number & MASK, 8 * entry, operation, name, self._spin)
            if places is not None:
                placed = zip(self._memories.values(), places, strict=True)
                return [memory.message(begin, size, dtype) for memory, (begin, size) in placed]
        messages = []
        for (rank, memory), size in zip(self._memories.items(), sizes, strict=True):
            if rank in self._uncompared:
                self._compare_late(rank)
            if size == 0:
                messages.append(memory.message(0, 0, dtype))
                if rank == self.rank:
                    continue
                if self._reached(rank, SENT, number):
                    self._compare(rank, number, operation, name)
                else:
                    self._uncompared.setdefault(rank, deque()).append((number, operation, name))
                continue
            if rank != self.rank or self._sent < number:
                self._wait(rank, SENT, number)
                self._compare(rank, number, operation, name)
            begin, sent = memory.words[entry], memory.words[entry + 1]
            if size is not None and sent != size:
                raise MismatchError(
                    f"{self.names[rank]} has sent {sent} bytes where {self.names[self.rank]} expects {size}: "
                    "they call different collectives, or with different shapes or dtypes"
                )
            messages.append(memory.message(begin, sent, dtype))
        return messages

    def _compare(self, rank: int, number: int, operation: int, name: bytes) -> None:
        """Raise if a message that was sent belongs to another operation than the one given."""
        memory, entry = self._memories[rank], self._entry(number)
        theirs = memory.words[entry + 3], bytes(memory.name(entry))
        # The entry may have been overwritten since. A process that overwrites it writes the number first.
        if memory.words[entry + 2] == number & MASK and (theirs[0] != operation or theirs[1] != name):
            raise MismatchError(
                f"ranks call different operations: {self.names[rank]} is at {_in_words(*theirs)}, "
                f"{self.names[self.rank]} at {_in_words(operation, name)}"
            )

    def _compare_late(self, rank: int) -> None:
        """Compare the empty messages that have arrived since."""
        waiting = self._uncompared[rank]
        while waiting and self._reached(rank, SENT, waiting[0][0]):
            self._compare(rank, *waiting[0])
            waiting.popleft()
        if not waiting:
            del self._uncompared[rank]

    def release(self) -> None:
        """Give back the places of the messages that :meth:`receive` has returned."""
        self._received += 1
        self._set(RECEIVED, self._received)

    def abandon(self) -> None:
        """Mark that this process sends no more, so that the others do not wait for its messages."""
        self._memories[self.rank].words[CLOSED // 8] = 1

    def stop(self, why: str) -> None:
        """Make waits in other threads raise a RuntimeError within a tenth of a second."""
        self._stopped = why

    def _check_size(self, size: int) -> None:
        if size > self.capacity:
            raise ValueError(f"a message of {size} bytes is larger than the capacity of {self.capacity}")

    def _all_have_received(self, number: int) -> bool:
        return self._received >= number and self._tables.reached(RECEIVED, number & MASK)

    @staticmethod
    def _entry(number: int) -> int:
        """The index of a message's entry in the table, in words of 8 bytes."""
        return (TABLE + ENTRY * (number % MOST_MESSAGES)) // 8

    def _set(self, counter: int, number: int) -> None:
        self._counter_set(self._own_address + counter, number & MASK)

    def _reached(self, rank: int, counter: int, number: int, spin: float = 0.0, sleep: float = 0.0) -> bool:
        return self._counter_wait(self._memories[rank].address + counter, number & MASK, spin, sleep)

    def _wait(self, rank: int, counter: int, number: int) -> None:
        if self._reached(rank, counter, number, self._spin):
            return
        timeout = self.timeout() if callable(self.timeout) else self.timeout
        deadline = time.monotonic() + (0.0 if rank in self._late else timeout)
        while not self._reached(rank, counter, number, sleep=0.0 if rank in self._late else longest_sleep()):
            # Messages that it has sent before it went are still valid.
            gone = self._memories[rank].is_gone()
            if rank in self._uncompared:
                self._compare_late(rank)  # it may have failed because it is at another operation
            if gone and not self._reached(rank, counter, number):
                raise RuntimeError(f"{self.names[rank]} has ended or closed its memory, and a message of it is missing")
            make_progress()
            if self._stopped:
                raise RuntimeError(self._stopped)
            if time.monotonic() > deadline:
                self._late.add(rank)
                seconds = f"{round(timeout, 1):g} seconds"
                raise RuntimeError(f"{self.names[rank]} has not sent or received a message for {seconds}")


def make_progress(but: object = None) -> None:
    """Receive and send without waiting, in all exchanges between two processes except ``but``."""
    for exchange in members(exchanges_between_two):
        if exchange is not but and exchange.is_under_way:
            exchange.progress()


def longest_sleep(but: object = None) -> float:
    """Seconds that a process may sleep until it calls :func:`make_progress` again."""
    if not exchanges_between_two:
        return _SLEEP
    others = (exchange for exchange in members(exchanges_between_two) if exchange is not but)
    return _POLL if any(exchange.is_under_way for exchange in others) else _SLEEP


def _in_words(operation: int, name: bytes) -> str:
    """An operation in words."""
    return f"operation {operation}, {name.rstrip(bytes(1)).decode(errors='replace') or 'which has no name'}"


@functools.lru_cache(4096)
def _padded(name: bytes) -> bytes:
    """The name of an operation as it lies in the table."""
    return name[:NAME].ljust(NAME, b"\0")
