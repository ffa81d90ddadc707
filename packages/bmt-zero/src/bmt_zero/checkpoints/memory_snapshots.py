"""Snapshots of a run in memory, to restore after a bad step or after the loss of a rank.

[Note: what outlives a process]
    If one rank of a job fails, ``torchrun`` ends all ranks and starts them again. Its own process on each host
    continues. So snapshots are files in a file system in memory, in a folder that is named after that process. A later
    job of the host removes folders whose process has ended.

    Let n be the number of ranks of a host. Each rank sends its snapshot to the rank whose number is larger by n, which
    is on the next host, and keeps the snapshot that it receives. After a restart, ranks exchange lists of the snapshots
    in the memory of their hosts, and choose the newest one that is available for every rank. The newest is the one that
    was taken last, whatever its step, because a run may have gone back. So the header of a file has the number of its
    ``take``, which is unique in the job.

    There are two files for each rank's snapshots, the last one and the one before. So if a rank ends while it writes a
    file, the other file is complete. A file begins with a mark and a header, which has its step and a checksum. It has
    no mark while it is being written.
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
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator, errors_on_all, note_place
from bmt_comm.startup import Peer

from .checkpointer import checked_step
from .contents import check_filled
from .memory import Snapshot, copy_into, places_of, view_of
from .objects import Objects
from .snapshot_state import describe, prepare_restore
from .store_communicator import StoreCommunicator
from .trainer_state import to_json

_HEAD = 64  # bytes of 8-byte words: a mark, and the words of _RankSnapshot._head
_MARK = 0x626D74536E617031
SnapshotKey = tuple[int, int]
"""The rank of a snapshot, and the number of the call that took it."""


class MemorySnapshots:
    """The last snapshot of a run, in host memory. Each rank has the snapshot of its own shards.

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

    All ranks must construct it at the same time and call the same methods in the same order.

    Args:
        directory: of a file system in memory, such as "/dev/shm". Snapshots are then available after ``torchrun`` has
            restarted the same number of ranks (``--max-restarts``). Each rank also keeps the snapshot of a rank of
            another host, so snapshots outlive the loss of a host. This takes four times the memory of a rank's shards.
            ``None``: snapshots are in the memory of this process alone, and take the memory of its shards once.
        timeout: seconds that a rank waits for others.

    Raises:
        RuntimeError: the directory cannot be used.
    """

    def __init__(self, directory: str | os.PathLike[str] | None = None, timeout: float = 1800.0) -> None:
        self._store = StoreCommunicator(timeout)
        self._rank, self._size = self._store.rank, self._store.size
        self._comm = Communicator(self._store.group, "cpu")
        self._kept: int | None = None  # the number of the snapshot that must not be overwritten
        self._has_removed_files = directory is None  # of ranks that were on this host before a restart
        self._folder = None if directory is None else _folder_of_job(Path(directory))
        self._own = self._snapshots("own")
        self._others = [] if self._folder is None else self._snapshots("other")  # of the rank that sends to this one
        folder = None if self._folder is None else str(self._folder.resolve())  # its name identifies the host
        newest = max((each.number or 0 for each in self._snapshots_of_host()), default=0)
        everyone = self._store.all_gather_json([int(os.environ.get("LOCAL_WORLD_SIZE", "1")), newest, folder])
        largest = max(local_size for local_size, _, _ in everyone)
        self._distance = largest if largest < self._size else 1  # to the rank that keeps this rank's snapshot
        self._number = max(number for _, number, _ in everyone)  # of the last snapshot, complete or not
        self._ranks_here = [rank for rank, (_, _, each) in enumerate(everyone) if each == folder]

    def _snapshots(self, kind: str) -> list[_RankSnapshot]:
        if self._folder is None:
            return [_RankSnapshot()]
        return [_RankSnapshot(self._folder / f"{self._rank}-{kind}-{number}") for number in range(2)]

    def take(self, step: int, **objects: Any) -> None:
        """Copy this rank's part of a run. Every rank must call it.

        It returns when everything is copied and sent to the other rank. It replaces the previous snapshot.

        Args:
            step: the number of the snapshot.
            objects: as for :meth:`Checkpointer.save`. The states of objects other than ``model``, ``manager`` and
                ``optimizer`` may differ between ranks. The states of the random generators are always included.

        Raises:
            RuntimeError: on every rank: a rank, which the message names, has not enough memory, or an object that
                cannot be saved.
        """
        note_place("the taking of a snapshot")
        self._number += 1
        parts: list[Tensor] = []

        def prepare() -> int:
            nonlocal step
            check_filled(objects.get("model"))  # a collective: first, because what follows may fail on one rank
            step = checked_step(step)
            parts.extend(_parts_of(*describe(Objects(objects))))
            return places_of(part.nbytes for part in parts)[1]

        sizes = self._together(prepare)
        if self._kept is None:
            for each in (*self._own, *self._others):  # left by earlier processes and not restored
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
            own.invalidate()  # the snapshot is incomplete; restore must not use it
            raise
        if rooms:
            self._comm.send_recv([(own.content(), target)], [(rooms[0], source)])
        self._kept = self._number
        if not self._has_removed_files:
            self._store.all_gather(b"")  # a barrier: no rank needs an earlier snapshot any more
            self._remove_files_of_other_ranks()
            self._has_removed_files = True

    def _together(self, call: Callable[[], int]) -> list[int]:
        """The results of a call on all ranks. If it raises on one rank, all ranks raise a RuntimeError."""
        problem: Exception | None = None
        size = 0
        try:
            size = call()
        except Exception as error:
            problem = error
        everyone = self._store.all_gather_json(
            [size, None if problem is None else f"{type(problem).__name__}: {problem}"]
        )
        try:
            for rank, (_, text) in enumerate(everyone):
                if text is not None:
                    raise RuntimeError(f"the snapshot was not taken: rank {rank}: {text}") from problem
        finally:
            problem = None  # its traceback refers to this frame
        return [size for size, _ in everyone]

    def _remove_files_of_other_ranks(self) -> None:
        """Remove the files of ranks that were on this host before a restart. The first rank of the host does it."""
        if self._folder is None or self._rank != self._ranks_here[0]:
            return
        names = [f"{rank}" for rank in self._ranks_here]
        with contextlib.suppress(FileNotFoundError):  # another rank has closed and removed the empty folder
            for path in list(self._folder.iterdir()):
                if path.name.partition("-")[0] not in names:
                    path.unlink(missing_ok=True)

    def _to_replace(self, snapshots: Sequence[_RankSnapshot]) -> _RankSnapshot:
        return next((each for each in snapshots if each.number != self._kept), snapshots[0])

    def restore(self, **objects: Any) -> int | None:
        """Restore the newest snapshot that is available for every rank. Every rank must call it.

        Gradients are not changed: zero them before the next backward pass. A process that took or restored the snapshot
        keeps its loss scale if it is smaller than the snapshot's, which may have overflowed since.

        Args:
            objects: as for :meth:`take`. The given objects are restored in place. Others are not changed: the position
                in the data, for example, after a bad batch.

        Returns:
            The step; ``None`` if there is no snapshot, or only one of another number of ranks.

        Raises:
            ValueError: on every rank: on one of them the snapshot is of another model, or of other objects. Nothing is
                changed then.
        """
        note_place("the return to a snapshot")
        local = {
            each.key: each for each in self._snapshots_of_host() if each.key is not None and each.ranks == self._size
        }
        chosen = self._choose(local)
        if chosen is None:
            return None
        number, sources = chosen
        sends = [
            (local[rank, number].content(), rank)
            for rank, (source, _) in sources.items()
            if source == self._rank and rank != self._rank
        ]
        source, size = sources[self._rank]
        mine = local[self._rank, number] if source == self._rank else _RankSnapshot()
        recvs = [] if source == self._rank else [(mine.room(size), source)]
        self._comm.send_recv(sends, recvs)
        with errors_on_all(self._comm):
            given, restore = _prepared(objects, mine)
        before = None if given.manager is None or self._kept is None else given.manager.trainer_state()
        with errors_on_all(self._comm):
            restore()
        if before is not None:  # keep the count of good steps, too: growing early would overflow again
            for name in ("loss_scale", "steps_since_last_scale"):
                setattr(given.manager, name, min(before[name], getattr(given.manager, name)))
        for each in local.values():
            if each.number != number:  # only the restored snapshot remains valid
                each.invalidate()
        self._kept = number
        return mine.step

    def _snapshots_of_host(self) -> list[_RankSnapshot]:
        """All snapshots in the memory of this host."""
        return self._own if self._folder is None else [_RankSnapshot(path) for path in sorted(self._folder.iterdir())]

    def _choose(self, local: dict[SnapshotKey, _RankSnapshot]) -> tuple[int, dict[int, tuple[int, int]]] | None:
        """The number of the newest snapshot that is available for every rank, and for each rank its source and size.

        The source of a rank's snapshot is a rank that has it in memory. The size is in bytes. Damaged snapshots are
        removed from ``local``.
        """
        while True:
            everyone = self._store.all_gather_json(
                [[rank, number, each.content().numel()] for (rank, number), each in local.items()]
            )
            sources: dict[int, dict[int, tuple[int, int]]] = {}  # by number and rank
            for source, snapshots in enumerate(everyone):
                for rank, number, size in snapshots:
                    of_number = sources.setdefault(number, {})
                    if source == rank or rank not in of_number:
                        of_number[rank] = source, size
            complete = [number for number, of_number in sources.items() if len(of_number) == self._size]
            if not complete:
                return None
            number = max(complete)
            used = [(rank, number) for rank, (source, _) in sources[number].items() if source == self._rank]
            damaged = [key for key in used if not local[key].is_intact()]
            for key in damaged:
                del local[key]
            if not any(self._store.all_gather_json(len(damaged))):
                return number, sources[number]

    def close(self) -> None:
        """Release the memory, so that no snapshot remains. Every rank calls it at the normal end of a run."""
        self._remove_files_of_other_ranks()
        for each in (*self._own, *self._others):
            each.remove()
        if self._folder is not None:
            with contextlib.suppress(OSError):  # other ranks of the host still have files there
                self._folder.rmdir()
        self._store.close()
        self._comm = Communicator(None, "cpu")  # drops the reference to the process group


def _prepared(objects: Mapping[str, Any], snapshot: _RankSnapshot) -> tuple[Objects, Callable[[], None]]:
    given = Objects(objects, loading=True)
    return given, prepare_restore(given, *snapshot.parts())


class _RankSnapshot:
    """A snapshot of one rank, in the memory of this process or in a file of a file system in memory.

    Args:
        path: the file, which an earlier process may have left; ``None``: the memory of this process.
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
        """The words of the header; empty if the snapshot is not complete.

        They are the step, the rank, the number of ranks, the bytes of the snapshot, the bytes of the description, the
        checksum, and the number of the snapshot.
        """
        if self._memory.numel() < _HEAD:
            return []
        mark, *head = self._memory[:_HEAD].view(torch.int64).tolist()
        return head if mark == _MARK and _HEAD < head[3] <= self._memory.numel() else []

    @property
    def step(self) -> int:
        return self._head()[0]

    @property
    def number(self) -> int | None:
        """The number of the ``take`` that took it; None if it is not complete."""
        head = self._head()
        return head[6] if head else None

    @property
    def key(self) -> SnapshotKey | None:
        head = self._head()
        return (head[1], head[6]) if head else None

    @property
    def ranks(self) -> int:
        """The number of ranks of the job."""
        return self._head()[2]

    def content(self) -> Tensor:
        """All bytes of a complete snapshot."""
        return self._memory[: self._head()[3]]

    def invalidate(self) -> None:
        self._memory[:8].zero_()

    def room(self, size: int, is_locked: bool = False) -> Tensor:
        """Memory for another snapshot, which replaces this one."""
        self.invalidate()
        if self._path is None:
            self._memory = self._private.room(size, is_locked)
        elif self._memory.numel() < size:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.posix_fallocate(file, 0, size)  # raises now; without it, writing would end the process by a signal
            except OSError as error:
                raise RuntimeError(
                    f"{self._path.parent} has no room for {size} bytes more: {error.strerror}"
                ) from error
            finally:
                os.close(file)
            self._map(size)
        return self._memory[:size]

    def write(self, head: Sequence[int], number: int, parts: Sequence[Tensor]) -> None:
        """Write a snapshot, of :func:`_parts_of`; ``head`` is the step, the rank and the number of ranks."""
        _, size = places_of(part.nbytes for part in parts)
        memory = self.room(size, any(part.is_cuda for part in parts))
        copy_into(memory, parts)
        words = memory[:_HEAD].view(torch.int64)
        words[1:] = torch.tensor([*head, size, parts[1].nbytes, _sum(memory), number], device="cpu")
        words[0] = _MARK

    def is_intact(self) -> bool:
        return _sum(self.content()) == self._head()[5]

    def parts(self) -> tuple[dict[str, Any], list[Tensor]]:
        """The arguments that :func:`_parts_of` was given, with tensors as bytes."""
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
    """The parts of a snapshot: room for the header, the description, and the tensors."""
    text = to_json({**described, "bytes": [tensor.nbytes for tensor in tensors]})
    return [
        torch.zeros(_HEAD, dtype=torch.uint8, device="cpu"),
        torch.frombuffer(bytearray(text), dtype=torch.uint8),
        *tensors,
    ]


def _sum(content: Tensor) -> int:
    """A checksum that takes no longer to compute than a copy."""
    return int(content[_HEAD:].view(torch.int64).sum())


def _folder_of_job(directory: Path) -> Path:
    """The folder of this job on this host. The folders of jobs that have ended are removed."""
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
