"""Memory of a process that others of this host map; see [Note: memory of messages] of bmt_kernels.shared_memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import weakref
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from bmt_kernels import _native
from bmt_kernels.message_places import MOST_MESSAGES

# Offsets in a process's memory, in bytes. Data that different processes write, or at different times, lie on different
# cache lines.
TOKEN, SENT, RECEIVED, CLOSED, TABLE = 0, 64, 128, 192, 256
ENTRY = 128  # bytes: place, size, number of the message, number of the operation, and the operation's name
_WORDS = 4  # of 8 bytes, before the name
NAME = ENTRY - 8 * _WORDS  # bytes; a longer name is truncated
_PAGE = mmap.PAGESIZE
_MOST_VIEWS = 256  # tensors of messages that are kept: small messages reuse places
HEADER = (TABLE + ENTRY * MOST_MESSAGES + _PAGE - 1) // _PAGE * _PAGE
MASK = (1 << 32) - 1  # of the counters
_madvise = ctypes.CDLL(None, use_errno=True).madvise
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class Memory:
    """One process's memory, as this process sees it."""

    def __init__(self, fd: int, capacity: int, process: int | None = None, header: int = HEADER) -> None:
        # mmap.mmap would keep a file descriptor for each map before Python 3.13.
        size = header + capacity
        try:
            mapped = torch.from_file(f"/proc/self/fd/{fd}", shared=True, size=size, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:
            raise OSError(f"the system does not map {size} bytes ({error})") from error
        self.address = mapped.data_ptr()
        self._mapped = (ctypes.c_ubyte * size).from_address(self.address)
        self._mapped.owner = mapped  # type: ignore[attr-defined]
        self._header = memoryview(self._mapped).cast("B")[:header]
        self.words = self._header.cast("q")  # of 8 bytes
        assert _native.cpu_module is not None
        self._describe = _native.cpu_module.describe
        self._process = None if process is None else Process.of(process)
        self._views: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def message(self, begin: int, size: int, dtype: torch.dtype) -> Tensor:
        """``size`` bytes as a vector."""
        view = self._views.get((begin, size, dtype))
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            with torch.inference_mode(False):  # it may be written outside of inference mode later
                if size == 0:
                    view = torch.empty(0, dtype=dtype, device="cpu")
                else:  # without an operation that the dispatch modes of a script would see
                    count = size // dtype.itemsize
                    view = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=HEADER + begin)
            self._views[begin, size, dtype] = view
        return view

    def describe(self, entry: int, place: int, size: int, number: int, operation: int, name: bytes) -> None:
        """Write an entry of the table."""
        self._describe(self.address + 8 * entry, place, size, number & MASK, operation, name)

    def name(self, entry: int) -> memoryview:
        """The name of an operation, padded with zeros."""
        begin = 8 * (entry + _WORDS)
        return self._header[begin : begin + NAME]

    def give_back(self, begin: int, end: int) -> None:
        """Release the memory of some messages to the system."""
        if _madvise(self.address + HEADER + begin, end - begin, mmap.MADV_REMOVE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def is_gone(self) -> bool:
        """Whether the owner has closed it, or its process has ended."""
        return self.words[CLOSED // 8] != 0 or (self._process is not None and self._process.has_ended())


class Process:
    """Another process, whose end can be checked."""

    _known: ClassVar[weakref.WeakValueDictionary[int, Process]] = weakref.WeakValueDictionary()

    def __init__(self, number: int) -> None:
        pidfd = os.pidfd_open(number)
        weakref.finalize(self, os.close, pidfd)
        self._pidfd = pidfd

    @classmethod
    def of(cls, number: int) -> Process:
        """The process of a number; one object for all callers."""
        process = cls._known.get(number)
        if process is None or process.has_ended():  # a later process may have the number
            process = cls._known[number] = cls(number)
        return process

    def has_ended(self) -> bool:
        poll = select.poll()  # threads may not use one at the same time
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))


def own_memory(capacity: int, header: int = HEADER) -> tuple[Memory, tuple[int, int, int]]:
    """New memory of this process, and the handle by which others map it: three integers below 2⁶².

    Raises:
        OSError: the system does not give such memory.
    """
    fd = os.memfd_create("bmt_kernels")
    try:
        os.ftruncate(fd, header + capacity)
        memory = Memory(fd, capacity, header=header)
    except BaseException:
        os.close(fd)
        raise
    token = memory.words[TOKEN // 8] = secrets.randbits(62)
    return memory, (os.getpid(), fd, token)


def open_all(
    own: Memory, rank: int, handles: Sequence[tuple[int, int, int]], capacity: int, header: int = HEADER
) -> dict[int, Memory] | None:
    """The memory of all processes, by rank; ``rank`` is this one. None: that of another cannot be mapped here."""
    memories = {}
    for place, handle in enumerate(handles):
        memory = own if place == rank else _open(*handle, capacity, header)
        if memory is None:
            return None
        memories[place] = memory
    return memories


def _open(process: int, fd: int, token: int, capacity: int, header: int) -> Memory | None:
    """The memory of another process, by its handle; None if it cannot be mapped here."""
    try:
        here = os.open(f"/proc/{process}/fd/{fd}", os.O_RDWR)
        try:
            if os.fstat(here).st_size != header + capacity:  # another process of that number
                return None
            memory = Memory(here, capacity, process, header)
        finally:
            os.close(here)
    except OSError:
        return None
    return memory if memory.words[TOKEN // 8] == token else None


def close(own: Memory, process: int, fd: int) -> None:
    """Mark the memory as closed, unless this is a fork of the process."""
    os.close(fd)
    if os.getpid() == process:
        own.words[CLOSED // 8] = 1
