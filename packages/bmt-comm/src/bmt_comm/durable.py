"""Files that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file beside ``path``, which is renamed to ``path`` if nothing is raised.

    After a loss of power at any moment, ``path`` is either the old file or the complete new one.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        sync_to_disk(part)
        os.replace(part, path)
        sync_to_disk(path.parent)
    finally:
        part.unlink(missing_ok=True)


def sync_to_disk(path: Path) -> None:
    """Flush a file's content, or a directory's entries, from the system's cache to the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
