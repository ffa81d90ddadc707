"""The manifest of a checkpoint: its files, their sizes and their checksums. It is written last.

``manifest.json`` is ``{"body": {...}, "crc32": "..."}``. ``crc32`` is the checksum of ``body``. In the body, the
``crc32`` of a file has eight hexadecimal digits for each piece of 1 MiB.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checksum import crc32
from .headers import DamagedError, parse_json, unreadable
from .plan import PIECE

NAME = "manifest.json"
FORMAT = 1
_LONGEST = 1 << 30
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}")


@dataclass(frozen=True)
class FileRecord:
    """A file: its size in bytes, and the CRC-32 of each of its pieces."""

    size: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Manifest:
    """The files of a complete checkpoint.

    Attributes:
        step: the step.
        is_finite: whether all parameters are finite numbers.
        files: by name.
        order: the position of this save among all saves to the directory. The newest has the highest.
    """

    step: int
    is_finite: bool
    files: Mapping[str, FileRecord]
    order: int = 0

    def to_json(self) -> bytes:
        files = {
            name: {"size": record.size, "crc32": "".join(f"{value:08x}" for value in record.checksums)}
            for name, record in sorted(self.files.items())
        }
        facts = {"format": FORMAT, "step": self.step, "order": self.order, "is_finite": self.is_finite}
        body = _canonical({**facts, "files": files})
        return b'{"body":' + body + f',"crc32":"{crc32(body):08x}"}}'.encode()


def record_of(content: bytes) -> FileRecord:
    """The record of a file with this content."""
    view = memoryview(content)
    return FileRecord(len(view), tuple(crc32(view[at : at + PIECE]) for at in range(0, len(view), PIECE)))


def is_file_name(name: Any) -> bool:
    """Whether a file of a checkpoint may have this name. It cannot have a path separator."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a checkpoint, after a check that all files exist with the recorded sizes.

    Raises:
        DamagedError: there is no manifest, it is damaged, or a file is missing or has another size.
        OSError: a file currently cannot be read.
    """
    path = directory / NAME
    manifest = parse_manifest(path, read_small_file(path))
    for name, record in manifest.files.items():
        try:
            size = (directory / name).stat().st_size
        except OSError as error:
            raise unreadable(directory / name, error) from None
        if size != record.size:
            raise DamagedError(f"{directory / name} has {size} bytes, and had {record.size} when it was written")
    return manifest


def parse_manifest(path: Path, text: bytes) -> Manifest:
    """A manifest from the bytes of its file.

    Raises:
        DamagedError: they are not a valid manifest.
    """
    value = parse_json(path, text)
    if not isinstance(value, dict) or value.keys() != {"body", "crc32"} or not isinstance(value["body"], dict):
        raise DamagedError(f"{path} is no manifest of a checkpoint")
    body = value["body"]
    if value["crc32"] != f"{crc32(_canonical(body)):08x}":
        raise DamagedError(f"{path} is damaged: its checksum is another one")
    if body.get("format") != FORMAT:
        raise DamagedError(f"{path} has the format {body.get('format')!r}; this version reads {FORMAT}")
    step, order, is_finite, files = (body.get(name) for name in ("step", "order", "is_finite", "files"))
    if type(step) is not int or type(order) is not int or type(is_finite) is not bool or not isinstance(files, dict):
        raise DamagedError(f"{path} lacks what a manifest has")
    records = {name: _parse_record(path, name, record) for name, record in files.items()}
    return Manifest(step, is_finite, records, order)


def _parse_record(path: Path, name: str, record: Any) -> FileRecord:
    if not is_file_name(name):
        raise DamagedError(f"{path} names a file {name[:100]!r}, which is no file of a checkpoint")
    if not isinstance(record, dict):
        raise DamagedError(f"{path} says nothing usable of {name}")
    size, text = record.get("size"), record.get("crc32")
    if type(size) is not int or size < 0 or not isinstance(text, str) or len(text) != 8 * -(-size // PIECE):
        raise DamagedError(f"{path} has a size and checksums of {name} that do not fit together")
    try:
        return FileRecord(size, tuple(int(text[at : at + 8], 16) for at in range(0, len(text), 8)))
    except ValueError:
        raise DamagedError(f"{path} has damaged checksums of {name}") from None


def read_small_file(path: Path, record: FileRecord | None = None) -> bytes:
    """The content of a file, compared with its record if there is one.

    Raises:
        DamagedError: the file is missing, has changed, or is longer than its record or the limit for files without one.
        OSError: the file currently cannot be read.
    """
    limit = _LONGEST if record is None else record.size
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            content = file.read(size) if size <= limit else None  # read() allocates `size` bytes
    except OSError as error:
        raise unreadable(path, error) from None
    if content is None:
        raise DamagedError(f"{path} has more than {limit} bytes, which is no file of this kind")
    if record is not None and record_of(content) != record:
        raise DamagedError(f"{path} has changed since it was written: its checksum is another one")
    return content


def _canonical(body: Any) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
