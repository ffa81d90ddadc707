"""Files that appear under their name only when they are complete and on the disk."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def complete_file(path: Path) -> Iterator[Path]:
    """Let the caller write another file beside ``path``, which takes its name if nothing is raised.

    Until then, and after a loss of power at any moment, ``path`` is what it was before, or the whole new file.
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
    """Write to the disk what the system still holds of a file's content, or of a directory's entries."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
