"""After a loss of power at any instant, there is a valid checkpoint.

The possible contents of the disk are built from the recorded writes and flushes.
"""

from __future__ import annotations

import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bmt_zero import Checkpointer

STEPS = [1, 2, 3, 3, 4]
"""The steps of the saves, in order. Parameters are filled with the number of the save, from 1 on."""

RECORDED_RUN = """
import os, pathlib, pickle, sys, time
import torch, bmt_comm, bmt_zero
from torch import nn

folder, record, *steps = sys.argv[1:]
context = bmt_comm.init_distributed(device="cpu")
real = {name: getattr(os, name) for name in ("open", "pwrite", "fsync", "rename", "mkdir", "unlink", "rmdir")}
events = []

def note(*event):
    events.append((time.monotonic_ns(), os.getpid(), *event))

def inode(status):
    return status.st_dev, status.st_ino

def place(path, dir_fd=None):  # the directory, by its inode, and the name in it
    path = os.fspath(path) if dir_fd is None else f"/proc/self/fd/{dir_fd}/{path}"
    return inode(os.stat(os.path.dirname(path))), os.path.basename(path)

def open_(path, flags, mode=0o777, *, dir_fd=None):
    handle = real["open"](path, flags, mode, dir_fd=dir_fd)
    if flags & os.O_CREAT:
        note("create", inode(os.fstat(handle)), *place(path, dir_fd), bool(flags & os.O_TRUNC))
    return handle

def pwrite(handle, content, offset):
    written = real["pwrite"](handle, content, offset)
    note("write", inode(os.fstat(handle)), offset, bytes(content[:written]))
    return written

def fsync(handle):  # keeps what was there when it began
    note("sync begins", inode(os.fstat(handle)))
    real["fsync"](handle)
    note("sync ends", inode(os.fstat(handle)))

def rename(source, target):
    real["rename"](source, target)
    note("rename", *place(source), *place(target))

def mkdir(path, *arguments, **options):
    real["mkdir"](path, *arguments, **options)
    note("mkdir", inode(os.stat(path)), *place(path))

def unlink(path, *, dir_fd=None):
    real["unlink"](path, dir_fd=dir_fd)
    note("remove", *place(path, dir_fd))

def rmdir(path, *, dir_fd=None):
    real["rmdir"](path, dir_fd=dir_fd)
    note("remove", *place(path, dir_fd))

layers = [nn.Linear(300, 300) for _ in range(3)]
model = bmt_zero.BMTrainModelWrapper(nn.Sequential(*layers))
checkpointer = bmt_zero.Checkpointer(folder, keep=2)
accessor = getattr(pathlib, "_NormalAccessor", None)  # Python 3.10, whose paths do not look into os
for function in (pwrite, fsync, rename, mkdir, unlink, rmdir):
    setattr(os, function.__name__, function)
    if hasattr(accessor, function.__name__):
        setattr(accessor, function.__name__, staticmethod(function))
os.open = open_
for number, step in enumerate(map(int, steps), 1):
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(number)
    checkpointer.save(step, model=model)
    checkpointer.wait()
context.world.barrier()
for name, function in real.items():
    setattr(os, name, function)
with open(f"{record}-{context.rank}", "wb") as file:
    pickle.dump(events, file)
"""


class Node:
    """A file or a directory: the content that processes see, and the content that is certainly on the disk."""

    def __init__(self, now: Any) -> None:
        self.now = now
        self.kept = type(now)()
        self.kept_since = 0
        self.changes: list[dict[str, Node | None]] = []  # of a directory's entries, since the last flush

    def change(self, entries: dict[str, Node | None]) -> None:
        self.changes.append(entries)
        apply(self.now, entries)

    def build(self, path: Path, survives: Callable[[], bool], remains: Callable[[bytes, bytes], bytes]) -> None:
        """Write a possible content of the disk after a loss of power.

        Args:
            survives: whether a change of entries that was not flushed is on the disk.
            remains: the content of a file on the disk, from the flushed and the written content.
        """
        if not isinstance(self.now, dict):
            path.write_bytes(remains(bytes(self.kept), bytes(self.now)) if self.kept != self.now else self.now)
            return
        entries = dict(self.kept)
        for change in self.changes:
            if survives():
                apply(entries, change)
        path.mkdir()
        for name, node in entries.items():
            node.build(path / name, survives, remains)


def apply(entries: dict[str, Node], changes: dict[str, Node | None]) -> None:
    for name, node in changes.items():
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


class Disk:
    """A directory and its content, from the recorded calls of all ranks."""

    def __init__(self, root: tuple[int, int]) -> None:
        self.root = Node({})
        self._nodes: dict[Any, Node] = {root: self.root}  # by inode; inodes of removed files are reused
        self._syncs: dict[tuple[int, Any], tuple[int, Any, int]] = {}
        self._begun = 0

    def take(self, process: int, kind: str, *facts: Any) -> None:
        if facts[kind in ("create", "mkdir")] not in self._nodes:
            return  # outside this directory
        if kind == "create":
            inode, folder, name, empties = facts
            if self._nodes[folder].now.get(name) is None or self._nodes[folder].now[name] is not self._nodes.get(inode):
                self._nodes[inode] = Node(bytearray())
                self._nodes[folder].change({name: self._nodes[inode]})
            if empties:
                self._nodes[inode].now = bytearray()
        elif kind == "write":
            inode, offset, content = facts
            data = self._nodes[inode].now
            data.extend(bytes(max(0, offset + len(content) - len(data))))
            data[offset : offset + len(content)] = content
        elif kind == "sync begins":
            node = self._nodes[facts[0]]
            self._begun += 1
            self._syncs[process, facts[0]] = self._begun, type(node.now)(node.now), len(node.changes)
        elif kind == "sync ends":
            node = self._nodes[facts[0]]
            begun, now, count = self._syncs.pop((process, facts[0]))
            if begun > node.kept_since:  # another process's flush may have begun later and ended earlier
                node.kept, node.kept_since = now, begun
                del node.changes[:count]
        elif kind == "mkdir":
            inode, folder, name = facts
            self._nodes[inode] = Node({})
            self._nodes[folder].change({name: self._nodes[inode]})
        elif kind == "rename":
            folder, name, other, target = facts
            assert folder == other
            self._nodes[folder].change({name: None, target: self._nodes[folder].now[name]})
        else:
            folder, name = facts
            self._nodes[folder].change({name: None})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_loss_of_power_at_any_instant_leaves_the_newest_checkpoint(tmp_path: Path, ranks: int) -> None:
    """The file system keeps what was flushed, and any part of everything else."""
    folder, state = tmp_path / "c", tmp_path / "state"
    folder.mkdir()
    (tmp_path / "run.py").write_text(RECORDED_RUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(tmp_path / "run.py"), str(folder), str(tmp_path / "record"), *map(str, STEPS)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    records = [pickle.loads((tmp_path / f"record-{rank}").read_bytes()) for rank in range(ranks)]
    events = sorted((event for record in records for event in record), key=lambda event: event[0])
    inode = os.stat(folder).st_dev, os.stat(folder).st_ino
    disk, generator = Disk(inode), random.Random(0)

    def some(kept: bytes, now: bytes) -> bytes:
        return generator.choice([kept, now, b"", now[: generator.randrange(len(now) + 1)], bytes(len(now))])

    losses: list[tuple[Callable[[], bool], Callable[[bytes, bytes], bytes]]] = [
        (lambda: False, lambda kept, now: kept),
        (lambda: True, lambda kept, now: now),
        (lambda: True, lambda kept, now: kept),
        (lambda: generator.random() < 0.5, some),
    ]
    named = flushed = 0  # saves that have their name, and saves whose name is on the disk
    syncs: dict[Any, int] = {}
    loaded: set[int] = set()
    for _, process, kind, *facts in events:
        disk.take(process, kind, *facts)
        if kind == "rename" and facts[3].startswith("step-") and facts[1].endswith(".part"):
            named += 1
        elif kind == "sync begins":
            syncs[facts[0]] = named
        elif kind == "sync ends" and facts[0] == inode:
            flushed = syncs[facts[0]]
        for survives, remains in losses:
            disk.root.build(state, survives, remains)
            model = nn.Sequential(*[nn.Linear(300, 300) for _ in range(3)])
            checkpointer = Checkpointer(state)
            step = checkpointer.load_latest(model=model)
            checkpointer.close()
            shutil.rmtree(state)
            if not step:
                assert not flushed
                continue
            number = int(model[0].bias[0])
            assert all(bool((param == number).all()) for param in model.parameters())
            assert STEPS[number - 1] == step
            assert flushed <= number <= named
            loaded.add(number)
    assert flushed == named == len(STEPS)
    assert loaded == {1, 2, 3, 4, 5}
    disk.root.build(state, lambda: True, lambda kept, now: now)
    assert contents(state) == contents(folder)  # the record is complete
