"""Files that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside ``path``, which is renamed to ``path`` if nothing is raised.

    After a loss of power at any moment, ``path`` is either the old file or the complete new one. What killed processes
    have left of ``path`` is removed first.
    """
    _remove_left_parts(path)
    # Not the process number alone: jobs in containers often have the same one, and would write to one file.
    part = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part")
    try:
        with open(part, "wb") as held:
            _lock(held.fileno())  # others see that its process lives
            yield part
        if not part.stat().st_size:
            raise FileNotFoundError(f"nothing was written to {part}")
        sync_to_disk(part)
        os.replace(part, path)
        sync_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def _remove_left_parts(path: Path) -> None:
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if "." in left.name[len(path.name) + 2 : -len(".part")]:  # of a file of another name
            continue
        with contextlib.suppress(OSError), open(left, "rb") as file:
            if _lock(file.fileno()):
                left.unlink()


def _lock(handle: int) -> bool:
    """Lock a file until ``handle`` is closed; False if the system cannot, or another process has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def sync_to_disk(path: Path) -> None:
    """Flush a file's content, or a directory's entries, from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
