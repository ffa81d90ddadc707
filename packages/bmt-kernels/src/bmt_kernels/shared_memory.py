"""Messages between processes of one host, through memory that they share.

[Note: slots]
    Each process owns a piece of anonymous memory that the others map, too: slots that only the owner writes, a table of
    which message lies in which slot, and two counters. ``sent`` says how many messages the owner has put into slots;
    ``received`` says how many messages *of every process* it has received. So a slot is free once all processes have
    received its message. The owner takes the first that is free: as long as the others keep up, messages stay in few
    slots, which stay in the caches, and the memory of the others is never touched.

    Whoever waits for a counter looks at it for a moment and then sleeps on it (a futex): messages need no thread that
    would have to get a processor first, and a message that is there already costs no system call.

    Processes find each other's memory by ``/proc/<process>/fd``, and know it by a random number in it. It has no name
    in any file system, so nothing is left behind whatever happens to the processes. Where this does not work (another
    host or container, another user, another system), :meth:`SharedMemoryExchange.connect` says so.
"""

from __future__ import annotations

import heapq
import mmap
import os
import secrets
import select
import time
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels import _native

SLOT_BYTES = 1 << 19

# Where things lie in a process's memory. What is written by different processes, or at different times, lies on
# different cache lines.
_TOKEN, _SENT, _RECEIVED, _CLOSED, _TABLE = 0, 64, 128, 192, 256
_HEADER = 4096
_MOST_SLOTS = (_HEADER - _TABLE) // 16

_SPIN = 100e-6  # seconds: longer than waking up takes
_SLEEP = 0.1  # seconds, after which one that waits looks whether the other process lives


class SharedMemoryExchange:
    """Messages between the processes of one host: each goes to all of them.

    All processes send and receive the same number of messages, in the same order. A process that has not received a
    message keeps the others from sending another ``slots`` messages later.

    Args:
        rank: this process's place among the processes.
        names: of the processes, for messages of errors.
        slots: how many messages may be under way, the same for all processes. Memory is taken only of those that are
            ever in use.
        timeout: seconds that this one waits for another.

    Raises:
        OSError: the system does not give such memory.
        RuntimeError: :meth:`available` is false.
        ValueError: ``rank`` or ``slots`` is out of range.
    """

    def __init__(self, rank: int, names: Sequence[str], slots: int = 8, timeout: float = 1800.0) -> None:
        if not self.available():
            raise RuntimeError("shared memory needs Linux and the compiled module of bmt-kernels; see build_info()")
        if not 0 <= rank < len(names):
            raise ValueError(f"rank={rank} must be the place of one of the {len(names)} names")
        if not 1 <= slots <= _MOST_SLOTS:
            raise ValueError(f"slots={slots} must be from 1 to {_MOST_SLOTS}")
        self.rank, self.names, self.slots, self.timeout = rank, tuple(names), slots, timeout
        self._token = secrets.randbits(62)
        self._fd = os.memfd_create("bmt_kernels")
        os.ftruncate(self._fd, _length(slots))
        own = _Memory(self._fd, slots)
        own.words[_TOKEN // 8] = self._token
        self._memories = {rank: own}
        self._sent = self._received = 0
        self._free = list(range(slots))  # a heap
        self._in_use: deque[tuple[int, int]] = deque()  # numbers of messages, and their slots
        # Where processes outnumber processors, the one that is waited for may be waiting for this one's.
        self._spin = _SPIN if len(names) <= len(os.sched_getaffinity(0)) else 0.0
        self._finalizer = weakref.finalize(self, _close, own, self._fd, os.getpid())

    @staticmethod
    def available() -> bool:
        """Whether this system and this build of the package can share memory at all."""
        module = _native.cpu_module
        return module is not None and hasattr(module, "counter_wait") and hasattr(os, "memfd_create")

    @property
    def handle(self) -> tuple[int, int, int]:
        """By which other processes find this one's memory: three integers below 2⁶²."""
        return os.getpid(), self._fd, self._token

    @property
    def slot_bytes(self) -> int:
        """The length of the longest message."""
        return SLOT_BYTES

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool:
        """Map the memory of all processes, whose handles are given by rank; whether that has worked.

        It must have for every process before any of them sends.
        """
        for rank, (process, fd, token) in enumerate(handles):
            if rank == self.rank:
                continue
            memory = _open(process, fd, token, self.slots)
            if memory is None:
                return False
            self._memories[rank] = memory
        self._memories = dict(sorted(self._memories.items()))
        return True

    def has_room(self) -> bool:
        """Whether :meth:`send` may be called now."""
        while self._in_use and all(self._reached(rank, _RECEIVED, self._in_use[0][0]) for rank in self._memories):
            heapq.heappush(self._free, self._in_use.popleft()[1])
        return bool(self._free)

    def wait_for_room(self) -> None:
        """Wait until :meth:`has_room`, that is, until all processes have received an earlier message.

        Raises:
            RuntimeError: a process has gone, or has not received it in time.
        """
        if not self.has_room():
            for rank in self._memories:
                self._wait(rank, _RECEIVED, self._in_use[0][0])

    def send(self, parts: Sequence[Tensor]) -> None:
        """Send the next message: ``parts`` (CPU, one-dimensional, of one dtype), end to end.

        Raises:
            ValueError: they are longer than ``slot_bytes``.
            RuntimeError: there is no room.
        """
        size = sum(part.nbytes for part in parts)
        if size > SLOT_BYTES:
            raise ValueError(f"a message of {size} bytes is longer than a slot, which has {SLOT_BYTES}")
        if not self.has_room():
            raise RuntimeError("there is no room for another message; call wait_for_room first")
        own, number, slot = self._memories[self.rank], self._sent + 1, self._free[0]
        begin = 0
        for part in parts:
            end = begin + part.nbytes
            own.slots[slot][begin:end].view(part.dtype).copy_(part)
            begin = end
        entry = self._entry(number)
        own.words[entry], own.words[entry + 1] = slot, size
        heapq.heappop(self._free)
        self._in_use.append((number, slot))
        self._sent = number
        self._set(_SENT, number)

    def receive(self, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Every process's next message, by rank: vectors of ``dtype`` with as many bytes as ``sizes`` says.

        They lie in the shared memory: they are not to be written, nor read after :meth:`release`, which must be
        called before the next ``receive``. Processes whose messages are empty are not waited for.

        Raises:
            RuntimeError: a process has gone, has sent a message of another size, or has not sent it in time. The
                message stays the next one.
        """
        number = self._received + 1
        entry = self._entry(number)
        messages = []
        for (rank, memory), size in zip(self._memories.items(), sizes, strict=True):
            if size == 0:
                messages.append(memory.slots[0][:0].view(dtype))
                continue
            self._wait(rank, _SENT, number)
            slot, found = memory.words[entry], memory.words[entry + 1]
            if found != size:
                raise RuntimeError(
                    f"{self.names[rank]} has sent {found} bytes where {self.names[self.rank]} expects {size}: "
                    "they call different collectives, or with different shapes or dtypes"
                )
            messages.append(memory.slots[slot][:size].view(dtype))
        return messages

    def release(self) -> None:
        """Give back the slots of the messages that :meth:`receive` has returned."""
        self._received += 1
        self._set(_RECEIVED, self._received)

    def _entry(self, number: int) -> int:
        """Where in the tables it stands in which slot a message lies, and how long it is."""
        return _TABLE // 8 + 2 * (number % self.slots)

    def _set(self, counter: int, number: int) -> None:
        assert _native.cpu_module is not None
        _native.cpu_module.counter_set(self._memories[self.rank].address + counter, number & 0xFFFFFFFF)

    def _reached(self, rank: int, counter: int, number: int, spin: float = 0.0, sleep: float = 0.0) -> bool:
        assert _native.cpu_module is not None
        address = self._memories[rank].address + counter
        return _native.cpu_module.counter_wait(address, number & 0xFFFFFFFF, spin, sleep)

    def _wait(self, rank: int, counter: int, number: int) -> None:
        if self._reached(rank, counter, number, self._spin):
            return
        deadline = time.monotonic() + self.timeout
        while not self._reached(rank, counter, number, sleep=_SLEEP):
            # What it has done before it went still counts.
            if self._memories[rank].is_gone() and not self._reached(rank, counter, number):
                raise RuntimeError(f"{self.names[rank]} has ended or closed its memory, and a message of it is missing")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"{self.names[rank]} has not sent or received a message for {self.timeout:g} seconds"
                )


class _Memory:
    """One process's memory, as this process sees it."""

    def __init__(self, fd: int, slots: int, process: int | None = None) -> None:
        mapped = mmap.mmap(fd, _length(slots))
        self.words = memoryview(mapped)[:_HEADER].cast("q")  # of 8 bytes
        memory = torch.frombuffer(mapped, dtype=torch.uint8)
        self.address = memory.data_ptr()
        self.slots = memory[_HEADER:].view(slots, SLOT_BYTES).unbind()
        self._process = None
        if process is not None:
            pidfd = os.pidfd_open(process)
            weakref.finalize(self, os.close, pidfd)
            self._process = select.poll()
            self._process.register(pidfd, select.POLLIN)

    def is_gone(self) -> bool:
        """Whether the owner has closed it, or its process has ended."""
        return self.words[_CLOSED // 8] != 0 or (self._process is not None and bool(self._process.poll(0)))


def _length(slots: int) -> int:
    return _HEADER + slots * SLOT_BYTES


def _open(process: int, fd: int, token: int, slots: int) -> _Memory | None:
    """The memory that a process has told of, if it can be had from here."""
    path = f"/proc/{process}/fd/{fd}"
    try:
        if os.stat(path).st_size != _length(slots):  # another process of that number
            return None
        here = os.open(path, os.O_RDWR)
        try:
            memory = _Memory(here, slots, process)
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
