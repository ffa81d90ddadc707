"""Files that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

try:
    import fcntl
except ImportError:  # a system without POSIX locks
    fcntl = None  # type: ignore[assignment]


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside ``path``, which is renamed to ``path`` if nothing is raised.

    After a loss of power at any moment, ``path`` is either the old file or the complete new one. What killed processes
    of this host have left of ``path`` is removed first.
    """
    _remove_left_parts(path)
    part, held = _new_part(path)
    try:
        with held:
            yield part
            if not part.stat().st_size:
                raise FileNotFoundError(f"nothing was written to {part}")
            sync_to_disk(part)
            os.replace(part, path)
        sync_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def obstacle(path: Path) -> str | None:
    """Why a file cannot be written, as far as it can be known before it is opened.

    Raises:
        OSError: this cannot be told, for example without permission to read the folder.
    """
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if path.is_dir():
        return "it is a folder"
    return "it is no regular file" if path.exists() and not path.is_file() else None


def _new_part(path: Path) -> tuple[Path, BinaryIO]:
    """A temporary file, locked until it is closed, so that others see that its process lives."""
    while True:
        # Not the process number alone: jobs in containers often have the same one, and would write to one file.
        part = path.with_name(f".{path.name}.{os.getpid()}-{_host()}-{secrets.token_hex(4)}.part")
        held = open(part, "xb")  # noqa: SIM115 - the caller closes it
        _lock(held)
        if part.exists():  # another process may have removed it before it was locked
            return part, held
        held.close()


def _remove_left_parts(path: Path) -> None:
    # Only of this host: some network file systems do not show the locks of other hosts.
    name = re.compile(rf"\.{re.escape(path.name)}\.\d+-{_host()}-[0-9a-f]{{8}}\.part")
    for left in path.parent.glob(".*.part"):
        if name.fullmatch(left.name):
            with contextlib.suppress(OSError), open(left, "r+b") as file:  # NFS locks what is open for writing
                if _lock(file):
                    left.unlink()


def _host() -> str:
    return f"{zlib.crc32(socket.gethostname().encode()):08x}"


def _lock(file: BinaryIO) -> bool:
    """Lock a file until it is closed; False if the system cannot, or another process has locked it."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
