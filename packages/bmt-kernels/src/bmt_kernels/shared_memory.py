"""Messages between processes of one host, through memory that they share.

[Note: memory of messages]
    Each process owns a piece of anonymous memory that the others map, too, and only the owner writes: messages, a table
    of where they lie and what they are for, and two counters. ``sent`` says how many messages the owner has written;
    ``received`` says how many messages *of every process* it has received. So the place of a message is free once all
    processes have received it. A message takes the first place that is large enough: as long as the others keep up, all
    messages lie in the same few pages, which stay in the caches, and no memory is taken for the rest.

    What all processes have received is given back, beyond what this one keeps, when it sends again: in this exchange,
    or something large in any of its exchanges.

    Whoever waits for a counter looks at it for a moment and then sleeps on it (a futex): messages need no thread that
    would have to get a processor first, and a message that is there already costs no system call.

    Processes find each other's memory by ``/proc/<process>/fd``, and know it by a random number in it. It has no name
    in any file system, so nothing is left behind whatever happens to the processes. Where this does not work (another
    host or container, another user, another system), :meth:`SharedMemoryExchange.connect` says so.
"""

from __future__ import annotations

import bisect
import functools
import math
import mmap
import os
import secrets
import select
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from bmt_kernels import _native

# Where things lie in a process's memory. What is written by different processes, or at different times, lies on
# different cache lines.
_TOKEN, _SENT, _RECEIVED, _CLOSED, _TABLE = 0, 64, 128, 192, 256
_MOST_MESSAGES = 4096
_ENTRY = 128  # bytes: place, size, number of the message, number of the operation, and the operation's name
_WORDS = 4  # of 8 bytes, before the name
_NAME = _ENTRY - 8 * _WORDS  # bytes; a longer name is cut
_PAGE = mmap.PAGESIZE
_SMALL = 1 << 14  # bytes
_MOST_VIEWS = 256  # tensors of messages that are kept: small messages lie where others have lain
_HEADER = (_TABLE + _ENTRY * _MOST_MESSAGES + _PAGE - 1) // _PAGE * _PAGE
_MASK = (1 << 32) - 1  # of the counters
_KEPT = 1 << 27  # bytes that stay this process's when messages are gone, in all exchanges; the others are given back

_SPIN = 100e-6  # seconds: longer than waking up takes
_SLEEP = 0.1  # seconds, after which one that waits looks whether the other process lives
_POLL = 1e-3  # seconds between two looks at what is under way in exchanges between two processes

# Exchanges of messages between two processes. Whoever waits for something else looks after them.
exchanges_between_two: weakref.WeakSet[Any] = weakref.WeakSet()
_adding = threading.Lock()


def members(exchanges: weakref.WeakSet[Any]) -> list[Any]:
    """Of a set of exchanges to which another thread may add; see :func:`add_exchange`."""
    with _adding:
        return list(exchanges)


def add_exchange(exchanges: weakref.WeakSet[Any], exchange: Any) -> None:
    """Add to a set that other threads may look through."""
    with _adding:
        exchanges.add(exchange)


class MismatchError(RuntimeError):
    """Processes exchange messages that do not belong together."""


class SharedMemoryExchange:
    """Messages between the processes of one host: each goes to all of them.

    All processes send and receive the same number of messages, in the same order. There is room for 4096 messages, and
    ``capacity`` bytes, that some process has not received.

    A message that is large is better written where it will lie: :meth:`reserve` gives a place for it,
    :meth:`send_reserved` sends it from there without a copy.

    A message may carry the number and the name of the operation that it belongs to. Each process compares those of the
    others with its own. That of an empty message, which is not waited for, is compared once it is there.

    Args:
        rank: this process's place among the processes.
        names: of the processes, for messages of errors.
        capacity: in bytes, the same for all processes. Memory is taken of what is in use.
        timeout: seconds that this one waits for another, or a function that returns them.

    Raises:
        OSError: the system does not give such memory.
        RuntimeError: :meth:`available` is false.
        ValueError: ``rank`` or ``capacity`` is out of range.
    """

    def __init__(
        self, rank: int, names: Sequence[str], capacity: int, timeout: float | Callable[[], float] = 1800.0
    ) -> None:
        if not self.available():
            raise RuntimeError("shared memory needs Linux and the compiled module of bmt-kernels; see build_info()")
        if not 0 <= rank < len(names):
            raise ValueError(f"rank={rank} must be the place of one of the {len(names)} names")
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be a positive number of bytes")
        self.rank, self.names, self.timeout = rank, tuple(names), timeout
        self.capacity = _pages(capacity)
        self._token = secrets.randbits(62)
        self._fd = os.memfd_create("bmt_kernels")
        try:
            os.ftruncate(self._fd, _HEADER + self.capacity)
            own = _Memory(self._fd, self.capacity)
        except BaseException:
            os.close(self._fd)
            raise
        own.words[_TOKEN // 8] = self._token
        self._memories, self._own_address = {rank: own}, own.address
        assert _native.cpu_module is not None
        self._counter_set, self._counter_wait = _native.cpu_module.counter_set, _native.cpu_module.counter_wait
        self._copy = _native.cpu_module.copy
        self._make_tables = _native.cpu_module.Tables
        self._tables = self._make_tables(0, [own.address])
        self._sent = self._received = 0
        self._in_use: deque[tuple[int, int, int]] = deque()  # numbers of messages, and where they begin and end
        self._taken: list[tuple[int, int]] = []  # where these and reserved places begin and end, in their order
        self._reserved: dict[int, int] = {}  # bytes of the places that are reserved, by where they begin
        self._freeing = threading.Lock()  # these, but reserved ones: another exchange may do it, in another thread
        # Of empty messages that were not there yet: by rank, their numbers, and the operations they must belong to.
        self._uncompared: dict[int, deque[tuple[int, int, bytes]]] = {}
        # Where processes outnumber processors, the one that is waited for may be waiting for this one's.
        self._stopped = ""  # why this one does not wait any more
        self._late: set[int] = set()  # those that this one has waited for in vain: it does not wait again
        self._spin = _SPIN if len(names) <= processors() else 0.0
        self._kept = 0  # bytes, from the beginning of the memory, that stay when messages are gone
        add_exchange(self._alive, self)
        # Not at exit: others notice that a process ends, and until then something may still be sent.
        weakref.finalize(self, _close, own, self._fd, os.getpid()).atexit = False

    _alive: ClassVar[weakref.WeakSet[SharedMemoryExchange]] = weakref.WeakSet()

    @staticmethod
    def available() -> bool:
        """Whether this system and this build of the package can share memory at all."""
        module = _native.cpu_module
        needed = [(module, "counter_wait"), (os, "memfd_create"), (os, "pidfd_open"), (mmap, "MADV_REMOVE")]
        return all(hasattr(owner, name) for owner, name in needed)

    @property
    def handle(self) -> tuple[int, int, int]:
        """By which other processes find this one's memory: three integers below 2⁶²."""
        return os.getpid(), self._fd, self._token

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool:
        """Map the memory of all processes, whose handles are given by rank; whether that has worked.

        It must have for every process before any of them sends.
        """
        memories = _open_all(self._memories[self.rank], self.rank, handles, self.capacity)
        if memories is None:
            return False
        self._memories = memories
        self._tables = self._make_tables(self.rank, [memory.address for memory in self._memories.values()])
        return True

    def has_room(self, size: int) -> bool:
        """Whether a message of ``size`` bytes may be sent now."""
        return self._free_place(size) is not None

    def wait_for_room(self, size: int) -> None:
        """Wait until all processes have received so many messages that one of ``size`` bytes may be sent.

        Raises:
            RuntimeError: a process has gone, or has not received them in time.
            ValueError: there can never be so much room.
        """
        self._check_size(size)
        while not self.has_room(size):
            first = next(iter(tuple(self._in_use)), None)  # another thread may free them
            if first is None:
                if self._reserved:
                    raise RuntimeError(f"reserved places leave no room for a message of {size} bytes")
                continue
            for rank in self._memories:
                self._wait(rank, _RECEIVED, first[0])

    def wait_for_others(self, most: int) -> None:
        """Wait until each process has sent as many messages as this one has received, empty ones among them.

        It does so only if more than ``most`` bytes of messages have not been received by all, in all exchanges of this
        process.

        Raises:
            RuntimeError: a process has gone, or has not sent them in time.
        """
        if self._free_places_of_all() <= most:
            return
        for rank in self._memories:
            if rank != self.rank:
                self._wait(rank, _SENT, self._received)

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
        place = self._free_place(size)
        if place is None:
            return False
        own, begin = self._memories[self.rank], place
        for part in parts:
            nbytes = part.nbytes
            if nbytes <= _SMALL:  # a call of torch costs more than the copy
                self._copy(self._own_address + _HEADER + begin, part.data_ptr(), nbytes)
            else:
                own.message(begin, nbytes, part.dtype).copy_(part)
            begin += nbytes
        bisect.insort(self._taken, (place, place + _pages(size)))
        self._publish(place, size, operation, name)
        return True

    def _publish(self, place: int, size: int, operation: int, name: bytes) -> None:
        """Send what lies at a place."""
        number = self._sent + 1
        self._memories[self.rank].describe(self._entry(number), place, size, number, operation, _padded(name))
        self._in_use.append((number, place, place + _pages(size)))
        self._sent = number
        self._set(_SENT, number)

    def reserve(self, size: int) -> int | None:
        """A place where a message of ``size`` bytes can be written, to be sent by :meth:`send_reserved`, if any."""
        self._check_size(size)
        place = self._free_place(size)
        if place is not None:
            bisect.insort(self._taken, (place, place + _pages(size)))
            self._reserved[place] = size
        return place

    def reserved(self, place: int, dtype: torch.dtype) -> Tensor:
        """What lies at a reserved place, a vector of ``dtype``. It may be written until it is sent."""
        return self._memories[self.rank].message(place, self._reserved[place], dtype)

    def send_reserved(self, place: int, operation: int = 0, name: bytes = b"") -> bool:
        """Send what was written at a reserved place; whether there was room in the table of messages.

        The place may have another message after all processes have received this one.
        """
        if len(self._in_use) == _MOST_MESSAGES:
            with self._freeing:
                self._free_places()
            if len(self._in_use) == _MOST_MESSAGES:
                return False
        self._publish(place, self._reserved.pop(place), operation, name)
        return True

    def give_back(self, place: int) -> None:
        """A reserved place will not be used."""
        end = place + _pages(self._reserved.pop(place))
        if end > self._kept:
            self._memories[self.rank].give_back(max(place, self._kept), end)
        self._taken.remove((place, end))

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
        if not self._uncompared:  # what is there, or comes soon
            found = self._tables.receive(sizes, number & _MASK, 8 * entry, operation, name, self._spin)
            if found is not None:
                places = zip(self._memories.values(), found, strict=True)
                return [memory.message(begin, size, dtype) for memory, (begin, size) in places]
        messages = []
        for (rank, memory), size in zip(self._memories.items(), sizes, strict=True):
            if rank in self._uncompared:
                self._compare_late(rank)
            if size == 0:
                messages.append(memory.message(0, 0, dtype))
                if rank == self.rank:
                    continue
                if self._reached(rank, _SENT, number):
                    self._compare(rank, number, operation, name)
                else:
                    self._uncompared.setdefault(rank, deque()).append((number, operation, name))
                continue
            if rank != self.rank or self._sent < number:
                self._wait(rank, _SENT, number)
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
        theirs = memory.words[entry + 3], memory.name(entry)
        # What was overwritten since is not known any more.
        if memory.words[entry + 2] == number & _MASK and (theirs[0] != operation or theirs[1] != name):
            raise MismatchError(
                f"ranks call different operations: {self.names[rank]} is at {_told(*theirs)}, "
                f"{self.names[self.rank]} at {_told(operation, name)}"
            )

    def _compare_late(self, rank: int) -> None:
        """Compare the empty messages that have come since."""
        waiting = self._uncompared[rank]
        while waiting and self._reached(rank, _SENT, waiting[0][0]):
            self._compare(rank, *waiting[0])
            waiting.popleft()
        if not waiting:
            del self._uncompared[rank]

    def release(self) -> None:
        """Give back the places of the messages that :meth:`receive` has returned."""
        self._received += 1
        self._set(_RECEIVED, self._received)

    def abandon(self) -> None:
        """Let the others, which may wait for messages, know that this process sends no more."""
        self._memories[self.rank].words[_CLOSED // 8] = 1

    def stop(self, why: str) -> None:
        """Let what waits here, in another thread, raise a RuntimeError within a tenth of a second."""
        self._stopped = why

    def _check_size(self, size: int) -> None:
        if size > self.capacity:
            raise ValueError(f"a message of {size} bytes is larger than the capacity of {self.capacity}")

    def _free_place(self, size: int) -> int | None:
        """The first place for a message, when those that all processes have received are gone."""
        if self._in_use:
            with self._freeing:
                self._free_places()
        if len(self._in_use) == _MOST_MESSAGES:
            return None
        if size > _KEPT:
            self._free_places_of_all()
        size, cursor = _pages(size), 0
        for begin, end in tuple(self._taken):  # another thread may free some
            if begin - cursor >= size:
                return cursor
            cursor = end
        return cursor if self.capacity - cursor >= size else None

    def _free_places(self) -> None:
        """Forget the messages that all processes have received."""
        while self._in_use and self._all_have_received(self._in_use[0][0]):
            _, begin, end = self._in_use.popleft()
            if end > self._kept:  # all exchanges of the process have _KEPT in common
                others = sum(exchange._kept for exchange in members(self._alive)) - self._kept
                self._kept = max(self._kept, min(end, (_KEPT - others) // _PAGE * _PAGE))
                if end > self._kept:
                    self._memories[self.rank].give_back(max(begin, self._kept), end)
            self._taken.remove((begin, end))  # now that it is empty, another thread may take it

    def _free_places_of_all(self) -> int:
        """Of all exchanges of this process; the bytes that are in use after that."""
        exchanges = members(self._alive)
        for exchange in exchanges:
            if exchange._in_use and exchange._freeing.acquire(blocking=False):
                try:
                    exchange._free_places()
                finally:
                    exchange._freeing.release()
        return sum(exchange._bytes_in_use for exchange in exchanges)

    @property
    def _bytes_in_use(self) -> int:
        return sum(end - begin for _, begin, end in tuple(self._in_use))

    def _all_have_received(self, number: int) -> bool:
        return self._received >= number and self._tables.reached(_RECEIVED, number & _MASK)

    @staticmethod
    def _entry(number: int) -> int:
        """Where in the tables it stands where a message lies, and how long it is."""
        return (_TABLE + _ENTRY * (number % _MOST_MESSAGES)) // 8

    def _set(self, counter: int, number: int) -> None:
        self._counter_set(self._own_address + counter, number & _MASK)

    def _reached(self, rank: int, counter: int, number: int, spin: float = 0.0, sleep: float = 0.0) -> bool:
        return self._counter_wait(self._memories[rank].address + counter, number & _MASK, spin, sleep)

    def _wait(self, rank: int, counter: int, number: int) -> None:
        if self._reached(rank, counter, number, self._spin):
            return
        timeout = self.timeout() if callable(self.timeout) else self.timeout
        deadline = time.monotonic() + (0.0 if rank in self._late else timeout)
        while not self._reached(rank, counter, number, sleep=0.0 if rank in self._late else longest_sleep()):
            # What it has done before it went still counts.
            gone = self._memories[rank].is_gone()
            if rank in self._uncompared:
                self._compare_late(rank)  # it may have found that it is elsewhere, and wait for nothing
            if gone and not self._reached(rank, counter, number):
                raise RuntimeError(f"{self.names[rank]} has ended or closed its memory, and a message of it is missing")
            make_progress()
            if self._stopped:
                raise RuntimeError(self._stopped)
            if time.monotonic() > deadline:
                self._late.add(rank)
                raise RuntimeError(f"{self.names[rank]} has not sent or received a message for {timeout:g} seconds")


def make_progress(but: object = None) -> None:
    """Receive and send what can be without waiting, in all exchanges between two processes but one."""
    for exchange in members(exchanges_between_two):
        if exchange is not but and exchange.is_under_way:
            exchange.progress()


def longest_sleep(but: object = None) -> float:
    """Seconds that a process may sleep until it calls :func:`make_progress` again."""
    if not exchanges_between_two:
        return _SLEEP
    others = (exchange for exchange in members(exchanges_between_two) if exchange is not but)
    return _POLL if any(exchange.is_under_way for exchange in others) else _SLEEP


def processors(root: Path = Path("/")) -> float:
    """How many this process may use: those that it may run on, or its share of time on them where that is less.

    Control groups, also those around its own, grant the share: of version 2 in ``cpu.max``, of version 1 in two files.
    ``root`` is where the system's files are.
    """
    share = float(len(os.sched_getaffinity(0)))
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return share
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = top / path.lstrip("/")
        for folder in (inner, *inner.parents):
            share = min(share, _granted(folder, bool(controllers)))
            if folder == top:
                break
    return share


def _granted(folder: Path, first_version: bool) -> float:
    """Processors that a control group grants; infinite where it does not say."""
    try:
        if first_version:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        else:
            quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return math.inf
    return math.inf if quota == "max" or int(quota) < 0 else int(quota) / int(period)


class _Memory:
    """One process's memory, as this process sees it."""

    def __init__(self, fd: int, capacity: int, process: int | None = None, header: int = _HEADER) -> None:
        self._mapped = mmap.mmap(fd, header + capacity)
        self._header = memoryview(self._mapped)[:header]
        self.words = self._header.cast("q")  # of 8 bytes
        self.address = torch.frombuffer(self._mapped, dtype=torch.uint8, count=1).data_ptr()
        assert _native.cpu_module is not None
        self._describe = _native.cpu_module.describe
        self._process = None if process is None else _Process.of(process)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def message(self, begin: int, size: int, dtype: torch.dtype) -> Tensor:
        """``size`` bytes as a vector."""
        view = self._views.get((begin, size, dtype))
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # it may be written outside of it later
                if size == 0:
                    view = torch.empty(0, dtype=dtype, device="cpu")
                else:
                    count = size // dtype.itemsize
                    view = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=_HEADER + begin)
            self._views[begin, size, dtype] = view
        return view

    def describe(self, entry: int, place: int, size: int, number: int, operation: int, name: bytes) -> None:
        """Write an entry of the table."""
        self._describe(self.address + 8 * entry, place, size, number & _MASK, operation, name)

    def name(self, entry: int) -> memoryview:
        """Of an operation, padded with zeros."""
        begin = 8 * (entry + _WORDS)
        return self._header[begin : begin + _NAME]

    def give_back(self, begin: int, end: int) -> None:
        """Let the system have the memory of some messages."""
        self._mapped.madvise(mmap.MADV_REMOVE, _HEADER + begin, end - begin)

    def is_gone(self) -> bool:
        """Whether the owner has closed it, or its process has ended."""
        return self.words[_CLOSED // 8] != 0 or (self._process is not None and self._process.has_ended())


class _Process:
    """Another process, to be watched."""

    _known: ClassVar[weakref.WeakValueDictionary[int, _Process]] = weakref.WeakValueDictionary()

    def __init__(self, number: int) -> None:
        pidfd = os.pidfd_open(number)
        weakref.finalize(self, os.close, pidfd)
        self._pidfd = pidfd

    @classmethod
    def of(cls, number: int) -> _Process:
        """One object for all that want to know."""
        found = cls._known.get(number)
        if found is None or found.has_ended():  # of which the number may be another's by now
            found = cls._known[number] = cls(number)
        return found

    def has_ended(self) -> bool:
        poll = select.poll()  # threads may not use one at the same time
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


def _told(operation: int, name: bytes | memoryview) -> str:
    """An operation in words."""
    return f"operation {operation}, {bytes(name).rstrip(bytes(1)).decode(errors='replace') or 'which has no name'}"


@functools.lru_cache(4096)
def _padded(name: bytes) -> bytes:
    """The name of an operation as it lies in the table."""
    return name[:_NAME].ljust(_NAME, b"\0")


def _pages(size: int) -> int:
    """``size`` in whole pages, one at least."""
    return max(1, -(-size // _PAGE)) * _PAGE


def _open_all(
    own: _Memory, rank: int, handles: Sequence[tuple[int, int, int]], capacity: int, header: int = _HEADER
) -> dict[int, _Memory] | None:
    """The memory of all processes, by rank, of which ``rank`` is this one; None: that of another cannot be had here."""
    memories = {}
    for place, handle in enumerate(handles):
        memory = own if place == rank else _open(*handle, capacity, header)
        if memory is None:
            return None
        memories[place] = memory
    return memories


def _open(process: int, fd: int, token: int, capacity: int, header: int) -> _Memory | None:
    """The memory that a process has told of, if it can be had from here."""
    path = f"/proc/{process}/fd/{fd}"
    try:
        if os.stat(path).st_size != header + capacity:  # another process of that number
            return None
        here = os.open(path, os.O_RDWR)
        try:
            memory = _Memory(here, capacity, process, header)
        finally:
            os.close(here)
    except OSError:
        return None
    return memory if memory.words[_TOKEN // 8] == token else None


def _close(own: _Memory, fd: int, process: int) -> None:
    """Tell the others that this process has left, unless this is a copy of it."""
    os.close(fd)
    if os.getpid() == process:
        own.words[_CLOSED // 8] = 1
