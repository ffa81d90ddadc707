"""The directory of a run's checkpoints: names, the lock, the complete checkpoints, and the removal of old ones.

``step-00001000``             a complete checkpoint
``.step-00001000.part``       one that is being written, or the leftover of a run that died
``.step-00001000.old``        one that is being replaced or removed
``.lock``                     locked by the run that writes here
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import math
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

from bmt_comm.durable import sync_to_disk

from .headers import DamagedError, unreadable
from .manifest import Manifest, read_manifest

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_log = logging.getLogger("bmt_zero.checkpoints")
_STEP = re.compile(r"step-([0-9]{8,18})")
_LEFTOVER = re.compile(r"\.step-([0-9]{8,18})\.(part|old)")
_held: set[tuple[int, int]] = set()  # (device, inode) of the locks of this process; fcntl does not exclude it from them


def step_name(step: int) -> str:
    """The name of a checkpoint's directory."""
    return f"step-{step:08}"


def listed_steps(directory: Path) -> list[int]:
    """The steps of all checkpoints by their names, complete or not, in ascending order."""
    try:
        names = os.listdir(directory)
    except FileNotFoundError:
        return []
    steps = [int(match[1]) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(step for step in steps if _may_be_directory(directory / step_name(step)))


def _may_be_directory(path: Path) -> bool:
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        return not isinstance(unreadable(path, error), DamagedError)


class Complete(NamedTuple):
    """The checkpoints whose manifests are valid and whose files exist with the recorded sizes.

    Attributes:
        checkpoints: newest first. The newest is the one that was saved last. Its step may be lower than others, if a
            run has loaded an earlier checkpoint.
        unread: the steps of checkpoints that currently cannot be read. They may be complete.
    """

    checkpoints: list[tuple[int, Manifest]]
    unread: list[int]


def complete_checkpoints(directory: Path, log: bool = True) -> Complete:
    """Look for complete checkpoints.

    Args:
        log: whether skipped damaged checkpoints are logged. Checkpoints that cannot be read are always logged.
    """
    checkpoints, unread = [], []
    for step in reversed(listed_steps(directory)):
        try:
            manifest = read_manifest(directory / step_name(step))
            if manifest.step != step:
                raise DamagedError(f"its manifest is that of step {manifest.step}")
        except DamagedError as error:
            if log:
                _log.warning("the checkpoint %s is passed over: %s", directory / step_name(step), error)
            continue
        except OSError as error:
            _log.warning("the checkpoint %s cannot be read for now: %s", directory / step_name(step), error)
            unread.append(step)
            continue
        checkpoints.append((step, manifest))
    return Complete(sorted(checkpoints, key=lambda each: (each[1].order, each[0]), reverse=True), unread)


def age_key(directory: Path, step: int) -> tuple[float, int]:
    """A key that is larger for a checkpoint that was written later. It uses the modification time of the directory,
    because the manifest may not be readable."""
    try:
        return os.stat(directory / step_name(step)).st_mtime, step
    except OSError:
        return math.inf, step


class DirectoryLock:
    """Excludes other runs from a directory until :meth:`release` or the end of this process.

    Args:
        directory: it must exist.
        patience: seconds to wait for another run to release the lock.

    Raises:
        RuntimeError: another run holds the lock.
        OSError: the file system cannot lock.
    """

    def __init__(self, directory: Path, patience: float = 5.0) -> None:
        if fcntl is None:
            raise RuntimeError("checkpoints need a POSIX system, whose locks and positioned writes they use")
        path = self._path = directory / ".lock"
        # Opening and closing the file again would release a lock that this process has on it.
        if path.exists() and _identity(os.stat(path)) in _held:
            raise _taken(directory, "this process")
        # Do not follow a symbolic link: its target would be overwritten.
        self._file = open(path, "a+", opener=lambda p, flags: os.open(p, flags | os.O_NOFOLLOW, 0o666))  # noqa: SIM115
        self._key = _identity(os.fstat(self._file.fileno()))
        deadline = time.monotonic() + patience
        # Data-loading processes do not inherit a lock of fcntl, unlike one of flock.
        while True:
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EACCES, errno.EAGAIN):  # these mean that another process has it
                    self._file.close()
                    raise
                if time.monotonic() > deadline:
                    self._file.seek(0)
                    owner = self._file.read(200).strip() or "unknown"
                    self._file.close()
                    raise _taken(directory, owner) from None
                time.sleep(0.1)
        _held.add(self._key)
        self._file.truncate(0)
        self._file.write(json.dumps({"host": socket.gethostname(), "process": os.getpid()}) + "\n")
        self._file.flush()

    def check(self) -> None:
        """Raise RuntimeError if the lock file was removed or replaced, or another run has taken the lock."""
        try:
            held = _identity(os.stat(self._path)) == self._key
        except FileNotFoundError:
            held = not self._path.parent.exists()  # if the directory is gone, writing to it raises a clearer error
        if not held:
            raise RuntimeError(f"its lock was removed or replaced: {self._path}; another run may write there")
        try:  # lock again: closing any handle of the file in this process, as copying the directory does, unlocks it
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RuntimeError(f"another run has taken its lock: {self._path}: {error}") from None

    def release(self) -> None:
        """Unlock the directory."""
        if not self._file.closed:
            _held.discard(self._key)
            self._file.close()

    def __del__(self) -> None:
        if hasattr(self, "_key"):
            self.release()


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _taken(directory: Path, owner: str) -> RuntimeError:
    return RuntimeError(
        f"another run writes checkpoints to {directory} ({owner}); give this run a directory of its own, or wait for "
        "the other's end"
    )


def clean_up(directory: Path) -> None:
    """Remove leftovers of dead runs, and restore a checkpoint that one of them was replacing. The lock must be held."""
    for name in sorted(os.listdir(directory)):
        match = _LEFTOVER.fullmatch(name)
        if match is None:
            continue
        original = directory / step_name(int(match[1]))
        if match[2] == "old" and not original.exists():
            with contextlib.suppress(DamagedError):
                read_manifest(directory / name)
                os.rename(directory / name, original)
                continue
        _log.info("removing %s, which a run that died has left", directory / name)
        shutil.rmtree(directory / name, ignore_errors=True)


def publish(directory: Path, part: Path, step: int) -> None:
    """Rename a complete checkpoint to its final name. It replaces one of the same step."""
    target, old = directory / step_name(step), directory / f".{step_name(step)}.old"
    shutil.rmtree(old, ignore_errors=True)
    replaces = target.exists()
    if replaces:
        os.rename(target, old)
    try:
        os.rename(part, target)
        sync_to_disk(directory)
    except OSError:
        if not part.exists():
            os.rename(target, part)
        if replaces:
            os.rename(old, target)
        raise
    if replaces:
        shutil.rmtree(old, ignore_errors=True)


def retire(directory: Path, keep: int, saved: int, damaged: Collection[int] = ()) -> None:
    """Remove all complete checkpoints but the newest ``keep`` and the newest one whose parameters are finite.

    Incomplete and damaged checkpoints do not count. They are removed if their steps are below all kept steps.
    Checkpoints that currently cannot be read do not count and are not removed.

    Args:
        saved: the step that was saved last. It is always kept.
        damaged: steps with files that do not match their checksums.
    """
    checkpoints, unread = complete_checkpoints(directory, log=False)
    complete = [each for each in checkpoints if each[0] not in damaged]
    steps = [step for step, _ in complete]
    kept = {saved, *steps[:keep], *[step for step, manifest in complete if manifest.is_finite][:1]}
    for step in listed_steps(directory):
        if step not in kept and step not in unread and (step < min(kept) or step in steps):
            old = directory / f".{step_name(step)}.old"
            shutil.rmtree(old, ignore_errors=True)
            os.rename(directory / step_name(step), old)
            shutil.rmtree(old, ignore_errors=True)
