"""Writing a plan: every rank its pieces, each in its place."""

from __future__ import annotations

import functools
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from .checksum import crc32
from .manifest import FileRecord, record_of
from .meeting import Meeting
from .memory import view_of
from .plan import PIECE, AddressSpace, Part, Task, WritePlan
from .regions import local_view, logical_view, pack, unpack

_T = TypeVar("_T")
_AHEAD = 16
"""Pieces that messages are under way for."""


class PieceWriter:
    """Writes this rank's pieces of the files of a checkpoint.

    Args:
        directory: the files' directory; it must exist.
        plan: what to write.
        own: this rank's part of each tensor, by its number, as bytes: uint8, 1-D.
        meeting: for the messages between ranks.

    Attributes:
        checksums: of each piece that was written.
        problem: the first error of this rank. After it messages are still exchanged, so that no rank waits.
    """

    def __init__(self, directory: Path, plan: WritePlan, own: Mapping[int, Tensor], meeting: Meeting) -> None:
        self.checksums: dict[int, int] = {}
        self.problem: Exception | None = None
        self._directory, self._plan, self._own, self._meeting = directory, plan, own, meeting
        self._space: AddressSpace = plan.space
        self._handles: dict[int, int] = {}
        self._window = torch.empty(PIECE, dtype=torch.uint8, device="cpu")

    def run(self) -> None:
        """Write, and flush to the disk. All ranks run at the same time."""
        under_way: deque[tuple[Task, list[tuple[Part, Tensor, Any]]]] = deque()
        try:
            for task in self._plan.tasks():
                under_way.append((task, list(self._messages(task))))
                if len(under_way) >= _AHEAD:
                    self._finish(*under_way.popleft())
            while under_way:
                self._finish(*under_way.popleft())
            for handle in self._handles.values():
                self._attempt(functools.partial(os.fsync, handle))
        finally:
            for handle in self._handles.values():
                try:
                    os.close(handle)
                except OSError as error:  # network file systems may tell of a quota only now
                    self.problem = self.problem or error

    def _attempt(self, call: Callable[[], _T]) -> _T | None:
        if self.problem is None:
            try:
                return call()
            except Exception as error:  # the others wait for messages
                self.problem = error
        return None

    def _messages(self, task: Task) -> Iterator[tuple[Part, Tensor, Any]]:
        """Start what a piece needs: (part, packed bytes, what to wait for)."""
        rank, group = self._meeting.rank, self._meeting.group
        for part in task.parts:
            if task.owner == rank and part.rank == rank:
                continue
            receives = task.owner == rank
            packed = self._attempt(functools.partial(self._message, part, receives))
            if packed is None:  # after an error the content of messages does not matter
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
        if task.owner != self._meeting.rank:
            return
        low, high = self._space.piece_range(task.piece)
        self._attempt(lambda: self._write(task.piece, low, self._assembled(task, messages, low, high)))

    def _assembled(self, task: Task, messages: list[tuple[Part, Tensor, Any]], low: int, high: int) -> memoryview:
        """The bytes of a piece."""
        own = next((part.regions for part in task.parts if part.rank == self._meeting.rank), [])
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
    """Write at an offset, in as many calls as it takes."""
    while len(content):
        written = os.pwrite(handle, content, offset)
        content, offset = content[written:], offset + written


def write_small_file(path: Path, content: bytes) -> FileRecord:
    """Write a file and flush it to the disk."""
    with ExitStack() as stack:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        stack.callback(os.close, handle)
        write_all(handle, memoryview(content), 0)
        os.fsync(handle)
    return record_of(content)
