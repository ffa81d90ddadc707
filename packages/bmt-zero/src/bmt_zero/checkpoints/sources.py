"""Sources of tensors: the files of a checkpoint, a Hugging Face directory, one safetensors file.

A source lists its tensors and reads any bytes of them. Files are not trusted: headers must fit the files, and files in
a manifest must have its checksums.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .checksum import crc32
from .directory import listed_steps, step_name
from .headers import DamagedError, Entry, FileLayout, header_length, parse_head, parse_json, unreadable
from .manifest import FileRecord, Manifest, is_file_name, read_small_file
from .memory import view_of
from .plan import PIECE

CHUNK = 4 * PIECE
"""The most bytes that are read into a buffer at a time."""
IN_PLACE = 8 * CHUNK
"""The most bytes that are read into a tensor at a time."""
BUFFER = CHUNK + 2 * PIECE
"""The size of the buffer of a file, in bytes: a chunk, and the rest of the pieces that it begins and ends in."""
_CHECKS = 16  # the most comparisons of checksums that are pending


class Source(Protocol):
    """Tensors that can be read in parts."""

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The tensors, by name."""
        ...

    @property
    def others(self) -> Mapping[str, Any]:
        """Other values of a state dict, by name."""
        ...

    @property
    def tied(self) -> Mapping[str, str]:
        """The first name of each tensor that has several."""
        ...

    @property
    def nbytes(self) -> int:
        """The size of all files."""
        ...

    def read(self, name: str, low: int, high: int) -> Tensor:
        """The bytes [low, high) of a tensor, at most :data:`CHUNK`: uint8, 1-D, valid until the next call.

        Raises:
            DamagedError: they cannot be read, or have changed since they were written.
        """
        ...

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        """Read bytes of a tensor, from ``low`` on, into ``out``: uint8, 1-D, on the CPU, at most :data:`IN_PLACE`.

        Raises:
            What :meth:`read` raises; ``out`` may be written then.
        """
        ...

    def finish(self) -> None:
        """Wait until the checksums of everything that was read into tensors are compared.

        Raises:
            DamagedError: something has changed since it was written.
        """
        ...


class OpenFile:
    """An open file, whose parts are read into a reused buffer or into tensors.

    Args:
        path: of the file.
        record: its size and checksums; ``None``: unknown. With checksums, complete pieces are read and compared.
        buffer: the buffer: uint8, of :data:`BUFFER` bytes.
        checker: starts the comparison of the checksums of what is read into tensors, while more is read; ``None``:
            everything is read through the buffer.
    """

    def __init__(
        self, path: Path, record: FileRecord | None, buffer: Tensor, checker: Callable[..., Any] | None = None
    ) -> None:
        self.path, self._record, self._buffer, self._checker = path, record, buffer, checker
        self._last = -1, buffer[:0]  # the last piece of which only a part was needed: its number and its bytes
        try:
            self._handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise unreadable(path, error) from None
        self.size = os.fstat(self._handle).st_size
        if record is not None and record.size != self.size:
            raise DamagedError(f"{path} has {self.size} bytes, and had {record.size} when it was written")

    def close(self) -> None:
        os.close(self._handle)
        # Release the memory: tracebacks of errors may keep this object alive.
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._last = -1, self._buffer

    def bytes_at(self, at: int, length: int) -> bytes:
        """A small part. Its checksum is not compared."""
        if at + length > self.size:
            raise DamagedError(f"{self.path} cannot be read: it ends at byte {self.size}; it may be truncated")
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
        self._fill(data, at)
        return bytes(view_of(data))

    def read(self, low: int, high: int) -> Tensor:
        """The bytes [low, high), at most :data:`CHUNK`; valid until the buffer is used again."""
        assert 0 <= low <= high <= min(self.size, low + CHUNK)
        if self._record is None:
            self._fill(self._buffer[: high - low], low)
            return self._buffer[: high - low]
        first, last = low // PIECE, -(-high // PIECE)
        begin, end = first * PIECE, min(last * PIECE, self.size)
        content = self._buffer[: end - begin]
        self._fill(content, begin)
        self._check_all(first, last, content)
        return content[low - begin : high - begin]

    def read_into(self, low: int, out: Tensor) -> None:
        """Read the bytes from ``low`` on into ``out``. Complete pieces are read in place. The checker compares them."""
        high = low + len(out)
        if self._record is None:
            self._fill(out, low)
        elif self._checker is None:
            for at in range(low, high, CHUNK):
                out[at - low : at - low + CHUNK].copy_(self.read(at, min(at + CHUNK, high)))
        else:
            first, last = -(-low // PIECE), high // PIECE
            if low < first * PIECE:
                self._read_part(first - 1, low, out)
            if first < last:
                pieces = out[first * PIECE - low : last * PIECE - low]
                self._fill(pieces, first * PIECE)
                self._checker(self._check_all, first, last, pieces)
            if max(first, last) * PIECE < high:
                self._read_part(last, low, out)

    def _read_part(self, piece: int, low: int, out: Tensor) -> None:
        """Read the part of a piece that is in ``out``, the bytes from ``low`` on. The piece is kept, because the next
        tensor in the file may need the rest of it."""
        begin = piece * PIECE
        if self._last[0] != piece:
            content = torch.empty(min(PIECE, self.size - begin), dtype=torch.uint8, device="cpu")
            self._fill(content, begin)
            assert self._checker is not None
            self._checker(self._check_all, piece, piece + 1, content)
            self._last = piece, content
        content = self._last[1]
        start, stop = max(low, begin), min(low + len(out), begin + len(content))
        out[start - low : stop - low].copy_(content[start - begin : stop - begin])

    def _check_all(self, first: int, last: int, content: Tensor) -> None:
        """Raise unless the pieces [first, last) have their checksums."""
        assert self._record is not None
        view = view_of(content)
        for piece in range(first, last):
            at = (piece - first) * PIECE
            if crc32(view[at : at + PIECE]) != self._record.checksums[piece]:
                raise DamagedError(
                    f"{self.path} has changed since it was written: the checksum of bytes {piece * PIECE} to "
                    f"{min((piece + 1) * PIECE, self.size)} is another one"
                )

    def _fill(self, out: Tensor, at: int) -> None:
        view = view_of(out)
        while len(view):
            try:
                count = os.preadv(self._handle, [view], at)
            except OSError as error:
                raise unreadable(self.path, error) from None
            if not count:
                raise DamagedError(f"{self.path} ends at byte {at}; it has been truncated")
            view, at = view[count:], at + count


class SafetensorsSource:
    """Tensors in safetensors files.

    Args:
        paths: of the files.
        records: their sizes and checksums, by name, where they are known.

    Attributes:
        entries: by name, of all files.

    Raises:
        DamagedError: a file is damaged, or two have a tensor of the same name.
    """

    def __init__(self, paths: Sequence[Path], records: Mapping[str, FileRecord] | None = None) -> None:
        self._buffer = torch.empty(BUFFER, dtype=torch.uint8, device="cpu")
        self._files: list[OpenFile] = []
        self._checker = ThreadPoolExecutor(1, "bmt-checksums")  # its thread starts at the first comparison
        self._checks: deque[Future[None]] = deque()
        self._places: dict[str, tuple[OpenFile, int]] = {}
        self.entries: dict[str, Entry] = {}
        self.others: dict[str, Any] = {}
        self.versions: dict[str, Any] | None = None  # of the modules; set by the function that opens a checkpoint
        self.tied: dict[str, str] = {}
        try:
            for path in paths:
                self._add(path, None if records is None else records[path.name])
        except BaseException:
            self.close()
            raise

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self._files)

    def _add(self, path: Path, record: FileRecord | None) -> None:
        file = OpenFile(path, record, self._buffer, self._check)
        self._files.append(file)
        layout = read_layout(file)
        for entry, offset in zip(layout.entries, layout.offsets):
            if entry.name in self.entries:
                raise DamagedError(f"{path} has {entry.name!r}, which another file of {path.parent} has, too")
            self.entries[entry.name] = entry
            self._places[entry.name] = (file, offset)

    def read(self, name: str, low: int, high: int) -> Tensor:
        file, offset = self._places[name]
        return file.read(offset + low, offset + high)

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        file, offset = self._places[name]
        file.read_into(offset + low, out)

    def finish(self) -> None:
        while self._checks:
            self._checks.popleft().result()

    def _check(self, call: Callable[..., None], *arguments: Any) -> None:
        self._checks.append(self._checker.submit(call, *arguments))
        while self._checks and (self._checks[0].done() or len(self._checks) > _CHECKS):  # they keep tensors alive
            self._checks.popleft().result()

    def close(self) -> None:
        self._checker.shutdown()
        for file in self._files:
            file.close()
        self._files.clear()
        self._places.clear()
        self._buffer = torch.empty(0, dtype=torch.uint8, device="cpu")


def read_layout(file: OpenFile) -> FileLayout:
    """The layout of an open file, from its header."""
    first = bytes(view_of(file.read(0, min(8, file.size))))
    length = header_length(file.path, first, file.size)
    head = bytearray()
    while len(head) < 8 + length:
        head += view_of(file.read(len(head), min(len(head) + CHUNK, 8 + length)))
    return parse_head(file.path, bytes(head), file.size)


def checkpoint_source(directory: Path, manifest: Manifest, section: str) -> SafetensorsSource:
    """The tensors of a section ("model" or "optimizer") of a checkpoint."""
    names = [name for name in manifest.files if name.startswith(f"{section}-") and name.endswith(".safetensors")]
    return SafetensorsSource([directory / name for name in sorted(names)], manifest.files)


def hugging_face_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory: one file, or the files of an index. Safetensors are preferred.

    Raises:
        DamagedError: the index is damaged, or names files outside the directory.
        FileNotFoundError: there are no weight files.
    """
    for single in (directory / "model.safetensors", directory / "pytorch_model.bin"):
        if single.is_file():
            return [single]
        index = directory / f"{single.name}.index.json"
        if index.is_file():
            return [directory / name for name in _indexed_files(index, single.suffix)]
    if steps := listed_steps(directory):
        raise FileNotFoundError(
            f"{directory} is a folder of checkpoints; give one of them, such as {directory / step_name(steps[-1])}"
        )
    raise FileNotFoundError(
        f"{directory}: it is a folder with neither model.safetensors nor pytorch_model.bin in it, nor the index of one"
    )


def _indexed_files(index: Path, suffix: str) -> list[str]:
    content = parse_json(index, read_small_file(index))
    weights = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weights, dict) or not weights:
        raise DamagedError(f"{index} has no weight_map")
    names = dict.fromkeys(value if isinstance(value, str) else repr(value) for value in weights.values())
    for name in names:
        if not is_file_name(name) or not name.endswith(suffix):
            raise DamagedError(f"{index} names the file {name[:100]!r}, which is none of its directory")
    return list(names)
