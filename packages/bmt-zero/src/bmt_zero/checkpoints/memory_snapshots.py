"""Snapshots of a run in memory: to go back to after a bad step, or after a rank was lost.

[Note: what outlives a process]
    ``torchrun`` ends all ranks of a job if one fails, and starts them again. Its own process on each host stays. So
    snapshots lie in files of a file system in memory, in a folder that is named after that process. A later job of
    the host removes folders whose process has ended.

    Each rank sends what it has to the rank as many numbers further as its host has ranks, which is on the next host,
    and keeps that of another one. After a restart the ranks tell each other which snapshots the memory of their hosts
    has, and take the newest that is there for every rank. The newest is the last that was taken, whatever its step: a
    run may have gone back. So a file has the number of its ``take`` in its head, which no other one of the job has.

    Of each snapshot and the one before there is a file, so that a rank that ends while it writes leaves a complete one.
    A file begins with a mark, its step and a check-sum. It has no mark while it is being written.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from bmt_comm import Communicator, note_place
from bmt_comm.startup import Peer
from bmt_zero.state import raise_on_all

from .checkpointer import checked_step
from .meeting import Meeting
from .memory import Snapshot, copy_into, places_of, view_of
from .objects import Objects
from .snapshot_state import describe, prepare_restore
from .trainer_state import to_json

_HEAD = 64  # bytes, of 8-byte words: a mark, and what _Copy._head gives
_MARK = 0x626D74536E617031
_Result = TypeVar("_Result")
Key = tuple[int, int]
"""The rank of a snapshot, and the number of the call that took it."""


class MemorySnapshots:
    """The last snapshot of a run, in host memory: each rank has that of its own shards.

    ::

        snapshots = MemorySnapshots("/dev/shm")
        step = snapshots.restore(model=model, manager=manager, data=batches) or 0  # after torchrun has restarted
        while step < steps:
            ...
            if not manager.step():  # back to the step of the snapshot, and on with the data that follow
                step = snapshots.restore(model=model, manager=manager) or step
                continue
            step += 1
            if step % 10 == 0:
                snapshots.take(step, model=model, manager=manager, data=batches)
        snapshots.close()

    Every rank makes one, at the same time, and calls the same methods in the same order.

    Args:
        directory: of a file system in memory, such as "/dev/shm": snapshots are then there after ``torchrun`` has
            restarted the ranks (``--max-restarts``), at the same number of ranks. Each rank also keeps the snapshot of
            a rank of the next host, so that they outlive the loss of a host. This takes four times the memory of a
            rank's shards; ``None`` takes it once, for this process alone.
        timeout: seconds that a rank waits for others.

    Raises:
        RuntimeError: the directory cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, timeout: float = 1800.0) -> None:
        self._meeting = Meeting(timeout)
        self._rank, self._size = self._meeting.rank, self._meeting.size
        self._comm = Communicator(self._meeting.group, "cpu")
        self._kept: int | None = None  # the number of the snapshot that must not be overwritten
        self._is_tidy = directory is None
        self._folder = None if directory is None else _folder_of_job(Path(directory))
        self._own = self._copies("own")
        self._others = [] if self._folder is None else self._copies("other")  # those of another rank
        folder = None if self._folder is None else str(self._folder.resolve())  # which names the host
        newest = max((each.number or 0 for each in self._held()), default=0)
        mine = [int(os.environ.get("LOCAL_WORLD_SIZE", "1")), newest, folder]
        everyone = [json.loads(each) for each in self._meeting.exchange(json.dumps(mine).encode())]
        largest = max(local_size for local_size, _, _ in everyone)
        self._distance = largest if largest < self._size else 1  # to the rank that keeps what this one has
        self._number = max(number for _, number, _ in everyone)  # of the last snapshot, complete or not
        self._ranks_here = [rank for rank, (_, _, each) in enumerate(everyone) if each == folder]

    def _copies(self, kind: str) -> list[_Copy]:
        if self._folder is None:
            return [_Copy()]
        return [_Copy(self._folder / f"{self._rank}-{kind}-{number}") for number in range(2)]

    def take(self, step: int, **objects: Any) -> None:
        """Copy this rank's part of a run. Every rank must call it.

        It returns when everything is copied, and sent to the other rank. The snapshot before is replaced.

        Args:
            step: the number of the snapshot.
            objects: as for :meth:`Checkpointer.save`; the state of those that are neither ``model`` nor ``manager`` nor
                ``optimizer`` may differ from rank to rank. The random generators are always part of it.

        Raises:
            RuntimeError: on every rank, naming the one that has not enough memory, or something that cannot be saved.
        """
        note_place("the taking of a snapshot")
        self._number += 1
        parts: list[Tensor] = []

        def prepare() -> int:
            nonlocal step
            step = checked_step(step)
            parts.extend(_parts_of(*describe(Objects(objects))))
            return places_of(part.nbytes for part in parts)[1]

        sizes = self._together(prepare)
        if self._kept is None:
            for each in (*self._own, *self._others):  # of processes that nothing was restored from
                each.invalidate()
        target, source = (self._rank + self._distance) % self._size, (self._rank - self._distance) % self._size
        own, others = self._to_replace(self._own), self._others if self._size > 1 else []
        rooms: list[Tensor] = []

        def write() -> int:
            own.write([step, self._rank, self._size], self._number, parts)
            rooms.extend(self._to_replace(others).room(sizes[source]) for _ in others[:1])
            return 0

        try:
            self._together(write)
        except RuntimeError:
            own.invalidate()  # or restore would go back to what was not taken
            raise
        if rooms:
            self._comm.send_recv([(own.content(), target)], [(rooms[0], source)])
        self._kept = self._number
        if not self._is_tidy:
            self._meeting.exchange(b"")  # no rank needs an earlier snapshot any more
            self._remove_strangers()
            self._is_tidy = True

    def _together(self, call: Callable[[], int]) -> list[int]:
        """What a call returns on every rank; all ranks raise if it does on one, so that none waits for it."""
        problem: Exception | None = None
        size = 0
        try:
            size = call()
        except Exception as error:
            problem = error
        mine = [size, None if problem is None else f"{type(problem).__name__}: {problem}"]
        everyone = [json.loads(each) for each in self._meeting.exchange(json.dumps(mine).encode())]
        try:
            for rank, (_, text) in enumerate(everyone):
                if text is not None:
                    raise RuntimeError(f"the snapshot was not taken: rank {rank}: {text}") from problem
        finally:
            problem = None  # its traceback refers to this frame
        return [size for size, _ in everyone]

    def _on_all(self, call: Callable[[], _Result]) -> _Result:
        """What a call returns, if it raises on no rank."""
        problem: Exception | None = None
        try:
            result = call()
        except Exception as error:  # the others are to raise, too
            problem = error
        try:
            raise_on_all(self._comm, problem)
        finally:
            problem = None  # its traceback refers to this frame
        return result

    def _remove_strangers(self) -> None:
        """Remove the files of ranks that were on this host before a restart; one rank of the host does it for all."""
        if self._folder is None or self._rank != self._ranks_here[0]:
            return
        names = [f"{rank}" for rank in self._ranks_here]
        with contextlib.suppress(FileNotFoundError):  # another rank has closed, and the folder was empty
            for path in list(self._folder.iterdir()):
                if path.name.partition("-")[0] not in names:
                    path.unlink(missing_ok=True)

    def _to_replace(self, copies: Sequence[_Copy]) -> _Copy:
        return next((each for each in copies if each.number != self._kept), copies[0])

    def restore(self, **objects: Any) -> int | None:
        """Go back to the newest snapshot that is there for every rank. Every rank must call it.

        Gradients stay as they are: zero them before the next backward pass. In the process that took the snapshot, or
        went on from it, a loss scale that is smaller than the snapshot's stays: that one may have overflowed since.

        Args:
            objects: as for :meth:`take`; those that are given go back, in place. What is left out goes on as it is: the
                position in the data, for example, after a bad batch.

        Returns:
            The step; ``None`` if there is no snapshot, or only one of another number of ranks.

        Raises:
            ValueError: on every rank: on one of them the snapshot is of another model, or of other objects. Nothing is
                changed then.
        """
        note_place("the return to a snapshot")
        here = {each.key: each for each in self._held() if each.key is not None and each.ranks == self._size}
        chosen = self._choose(here)
        if chosen is None:
            return None
        number, holders = chosen
        sends = [(here[rank, number].content(), rank) for rank, (holder, _) in holders.items() if holder == self._rank]
        holder, size = holders[self._rank]
        mine = here[self._rank, number] if holder == self._rank else _Copy()
        recvs = [] if holder == self._rank else [(mine.room(size), holder)]
        self._comm.send_recv([(content, rank) for content, rank in sends if rank != self._rank], recvs)
        given, restore = self._on_all(lambda: _prepared(objects, mine))
        now = None if given.manager is None or self._kept is None else given.manager.trainer_state()
        self._on_all(restore)
        if now is not None:  # the good steps that are left to the next growth, too, or the same overflow comes again
            for name in ("loss_scale", "steps_since_last_scale"):
                setattr(given.manager, name, min(now[name], getattr(given.manager, name)))
        for each in here.values():
            if each.number != number:  # the run goes on from this one
                each.invalidate()
        self._kept = number
        return mine.step

    def _held(self) -> list[_Copy]:
        """All snapshots in the memory of this host."""
        return self._own if self._folder is None else [_Copy(path) for path in sorted(self._folder.iterdir())]

    def _choose(self, here: dict[Key, _Copy]) -> tuple[int, dict[int, tuple[int, int]]] | None:
        """The newest snapshot that is there for every rank, and for each rank who has it and how many bytes it is.

        Of ``here``, damaged ones are dropped.
        """
        while True:
            mine = [[rank, number, each.content().numel()] for (rank, number), each in here.items()]
            everyone = [json.loads(each) for each in self._meeting.exchange(json.dumps(mine).encode())]
            holders: dict[int, dict[int, tuple[int, int]]] = {}  # by number and rank
            for holder, held in enumerate(everyone):
                for rank, number, size in held:
                    of_number = holders.setdefault(number, {})
                    if holder == rank or rank not in of_number:
                        of_number[rank] = holder, size
            complete = [number for number, of_number in holders.items() if len(of_number) == self._size]
            if not complete:
                return None
            number = max(complete)
            used = [(rank, number) for rank, (holder, _) in holders[number].items() if holder == self._rank]
            damaged = [key for key in used if not here[key].is_intact()]
            for key in damaged:
                del here[key]
            if not any(json.loads(each) for each in self._meeting.exchange(json.dumps(len(damaged)).encode())):
                return number, holders[number]

    def close(self) -> None:
        """Give the memory back; nothing is left for a later process. At a normal end of a run every rank calls it."""
        self._remove_strangers()
        for each in (*self._own, *self._others):
            each.remove()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # other ranks of the host have their files there
                self._folder.rmdir()
        self._meeting.leave()
        self._comm = Communicator(None, "cpu")  # the other one would keep the process group


def _prepared(objects: Mapping[str, Any], copy: _Copy) -> tuple[Objects, Callable[[], None]]:
    given = Objects(objects, loading=True)
    return given, prepare_restore(given, *copy.parts())


class _Copy:
    """A snapshot of one rank, in the memory of this process or in a file of memory.

    Args:
        path: the file, which may be there from an earlier process.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._private = Snapshot()
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        if path is not None and path.exists() and path.stat().st_size > _HEAD:
            self._map(path.stat().st_size)

    def _map(self, size: int) -> None:
        self._memory = torch.from_file(str(self._path), shared=True, size=size, dtype=torch.uint8)

    def _head(self) -> list[int]:
        """The step, the rank, the ranks, the bytes of all and of the description, the check-sum, and the number."""
        if self._memory.numel() < _HEAD:
            return []
        mark, *head = self._memory[:_HEAD].view(torch.int64).tolist()
        return head if mark == _MARK and _HEAD < head[3] <= self._memory.numel() else []

    @property
    def step(self) -> int:
        return self._head()[0]

    @property
    def number(self) -> int | None:
        """None if it is not complete."""
        head = self._head()
        return head[6] if head else None

    @property
    def key(self) -> Key | None:
        head = self._head()
        return (head[1], head[6]) if head else None

    @property
    def ranks(self) -> int:
        """Of the job."""
        return self._head()[2]

    def content(self) -> Tensor:
        """All bytes of a complete one."""
        return self._memory[: self._head()[3]]

    def invalidate(self) -> None:
        self._memory[:8].zero_()

    def room(self, size: int, is_locked: bool = False) -> Tensor:
        """Memory for another snapshot in place of this one."""
        self.invalidate()
        if self._path is None:
            self._memory = self._private.room(size, is_locked)
        elif self._memory.numel() < size:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(file, 0, size)  # an error now, and not a signal when it is written
            except OSError as error:
                raise RuntimeError(
                    f"{self._path.parent} has no room for {size} bytes more: {error.strerror}"
                ) from error
            finally:
                os.close(file)
            self._map(size)
        return self._memory[:size]

    def write(self, head: Sequence[int], number: int, parts: Sequence[Tensor]) -> None:
        """Copy a snapshot, of :func:`_parts_of`; ``head`` is the step, the rank and the number of ranks."""
        _, size = places_of(part.nbytes for part in parts)
        memory = self.room(size, any(part.is_cuda for part in parts))
        copy_into(memory, parts)
        words = memory[:_HEAD].view(torch.int64)
        words[1:] = torch.tensor([*head, size, parts[1].nbytes, _sum(memory), number], device="cpu")
        words[0] = _MARK

    def is_intact(self) -> bool:
        return _sum(self.content()) == self._head()[5]

    def parts(self) -> tuple[dict[str, Any], list[Tensor]]:
        """What :func:`_parts_of` was given; tensors as bytes."""
        head, memory = self._head(), self._memory
        described = json.loads(bytes(view_of(memory[_HEAD : _HEAD + head[4]])))
        sizes = [_HEAD, head[4], *described["bytes"]]
        starts, _ = places_of(sizes)
        return described, [memory[start : start + size] for start, size in zip(starts[2:], sizes[2:])]

    def remove(self) -> None:
        self._memory, self._private = self._memory.new_empty(0), Snapshot()
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def _parts_of(described: Mapping[str, Any], tensors: Sequence[Tensor]) -> list[Tensor]:
    """What a snapshot consists of, from its head on."""
    text = to_json({**described, "bytes": [tensor.nbytes for tensor in tensors]})
    return [
        torch.zeros(_HEAD, dtype=torch.uint8, device="cpu"),
        torch.frombuffer(bytearray(text), dtype=torch.uint8),
        *tensors,
    ]


def _sum(content: Tensor) -> int:
    """A check-sum that takes no longer than a copy."""
    return int(content[_HEAD:].view(torch.int64).sum())


def _folder_of_job(directory: Path) -> Path:
    """The folder of this job on this host; those of jobs that have ended are removed."""
    here = Peer.here()
    launcher = Peer.of(os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else os.getpid())
    prefix = f"bmt-snapshots-{os.getuid()}-{hashlib.sha256(here.host.encode()).hexdigest()[:12]}-"
    folder = directory / f"{prefix}{launcher.process}-{launcher.started}"
    try:
        for other in directory.glob(f"{prefix}*"):
            process, _, started = other.name.removeprefix(prefix).partition("-")
            if Peer(here.host, int(process), started).state() == "ended":
                shutil.rmtree(other, ignore_errors=True)  # other ranks may do the same
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
    except OSError as error:
        raise RuntimeError(f"{directory} cannot be used for snapshots: {error}") from error
    return folder
