"""Executing a write plan: each rank writes its pieces at their offsets in the files."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .checksum import crc32
from .manifest import FileRecord, record_of
from .memory import view_of
from .plan import PIECE, AddressSpace, Part, Task, WritePlan
from .regions import local_view, logical_view, pack, unpack
from .store_communicator import StoreCommunicator

_T = TypeVar("_T")
_AHEAD = 16
"""The most pieces whose messages are pending."""


class PieceWriter:
    """Writes this rank's pieces of the files of a checkpoint.

    Args:
        directory: the files' directory; it must exist.
        plan: this rank's pieces.
        own: this rank's part of each tensor, by the tensor's number, as bytes: uint8, 1-D.
        comm: its group sends the messages between ranks.

    Attributes:
        checksums: of the pieces that were written, by their numbers.
        problem: the first error of this rank. Messages are still exchanged after it, so that no other rank waits.
    """

    def __init__(self, directory: Path, plan: WritePlan, own: Mapping[int, Tensor], comm: StoreCommunicator) -> None:
        self.checksums: dict[int, int] = {}
        self.problem: Exception | None = None
        self._directory, self._plan, self._own, self._comm = directory, plan, own, comm
        self._space: AddressSpace = plan.space
        self._handles: dict[int, int] = {}
        self._window = torch.empty(PIECE, dtype=torch.uint8, device="cpu")

    def run(self) -> None:
        """Write the pieces, and flush them to the disk. All ranks must call it."""
        pending: deque[tuple[Task, list[tuple[Part, Tensor, Any]]]] = deque()
        try:
            for task in self._plan.tasks():
                pending.append((task, list(self._messages(task))))
                if len(pending) >= _AHEAD:
                    self._finish(*pending.popleft())
            while pending:
                self._finish(*pending.popleft())
            for handle in self._handles.values():
                self._attempt(functools.partial(os.fsync, handle))
        finally:
            for handle in self._handles.values():
                try:
                    os.close(handle)
                except OSError as error:  # network file systems may report a quota only now
                    self.problem = self.problem or error

    def _attempt(self, call: Callable[[], _T]) -> _T | None:
        if self.problem is None:
            try:
                return call()
            except Exception as error:  # other ranks wait for messages
                self.problem = error
        return None

    def _messages(self, task: Task) -> Iterator[tuple[Part, Tensor, Any]]:
        """Start the messages of a piece: (part, packed bytes, work to wait for)."""
        rank, group = self._comm.rank, self._comm.group
        for part in task.parts:
            if task.owner == rank and part.rank == rank:
                continue
            receives = task.owner == rank
            packed = self._attempt(functools.partial(self._message, part, receives))
            if packed is None:  # after an error, the content of messages is ignored
                packed = self._window[: part.nbytes]
            if receives:
                yield part, packed, dist.irecv(packed, part.rank, group=group)
            else:
                yield part, packed, dist.isend(packed, task.owner, group=group)

    def _message(self, part: Part, empty: bool) -> Tensor:
        """The packed bytes of a part, or room for them."""
        packed = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
        at = 0
        for number, region in () if empty else part.regions:
            pack(packed[at : at + region.nbytes], self._own[number], [region])
            at += region.nbytes
        return packed

    def _finish(self, task: Task, messages: list[tuple[Part, Tensor, Any]]) -> None:
        for _, _, work in messages:
            work.wait()
        if task.owner != self._comm.rank:
            return
        low, high = self._space.piece_range(task.piece)
        self._attempt(lambda: self._write(task.piece, low, self._assembled(task, messages, low, high)))

    def _assembled(self, task: Task, messages: list[tuple[Part, Tensor, Any]], low: int, high: int) -> memoryview:
        """The bytes of a piece."""
        own = next((part.regions for part in task.parts if part.rank == self._comm.rank), [])
        if len(own) == 1 and own[0][1].runs == 1 and own[0][1].run == high - low:
            number, region = own[0]
            return view_of(self._own[number][region.local : region.local + region.run])
        window = self._window[: high - low]
        file = self._space.file_of(low)
        head, base = self._space.files[file].head, self._space.bases[file]
        if low - base < len(head):
            begin, end = low - base, min(len(head), high - base)
            view_of(window)[: end - begin] = head[begin:end]
        for number, region in own:
            logical_view(window, region, low).copy_(local_view(self._own[number], region))
        for part, packed, _ in messages:
            unpack(window, low, packed, [region for _, region in part.regions])
        return view_of(window)

    def _write(self, piece: int, low: int, content: memoryview) -> None:
        file = self._space.file_of(low)
        if file not in self._handles:
            path = self._directory / self._space.files[file].name
            self._handles[file] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        write_all(self._handles[file], content, low - self._space.bases[file])
        self.checksums[piece] = crc32(content)


def write_all(handle: int, content: memoryview, offset: int) -> None:
    """Write at an offset. One call of ``pwrite`` may write only a part."""
    while len(content):
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written


def write_small_file(path: Path, content: bytes) -> FileRecord:
    """Write a file and flush it to the disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    try:
        write_all(handle, memoryview(content), 0)
        os.fsync(handle)
    finally:
        os.close(handle)
    return record_of(content)
