"""Files of ``torch.save`` as sources of tensors. They may hold only tensors and plain values, with valid checksums.

A file is a zip archive of uncompressed records: ``data.pkl``, and the storages under ``data/<key>``. Under
``torch.serialization.set_crc32_options(False)`` all checksums are 0. Before torch 1.6, a file was a sequence of pickles
followed by the storages, without checksums.
"""

from __future__ import annotations

import errno
import functools
import math
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bmt_zero.state import valid_versions

from .checksum import crc32
from .headers import NAMES, DamagedError, Entry, unreadable
from .memory import view_of
from .pickles import OtherTensor, Pickled, PickleError, TensorRecord, read_pickle
from .sources import BUFFER, CHUNK, OpenFile

_LONGEST_PICKLE = 1 << 26
_SMALL = 1 << 12
_MAGIC = 0x1950A86A20F9469CFC6C  # the beginning of files before torch 1.6


class PtSource:
    """The tensors of a ``torch.save`` file; see :class:`~bmt_zero.checkpoints.sources.Source`.

    Attributes:
        entries: the tensors, by name.
        tied: for each further name of a tensor that has several names, the first name.
        nbytes: of the file.
        versions: of the modules; see :func:`~bmt_zero.state.with_versions`.

    Raises:
        DamagedError: the file is damaged, would run code, or holds no state dict.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = OpenFile(path, None, torch.empty(BUFFER, dtype=torch.uint8, device="cpu"))
        self._places: dict[str, tuple[int, int]] = {}  # the offset and the length of each storage in the file
        self._packed: dict[str, Tensor] = {}  # a contiguous copy of the last tensor that is not contiguous in the file
        self.nbytes = self._file.size
        try:
            self._state = self._open()
            self._records = {
                name: value
                for name, value in self._state.items()
                if isinstance(value, TensorRecord) and value.dtype in NAMES
            }
            for name, record in self._records.items():
                self._check(name, record)
            self.entries = {n: Entry(n, NAMES[r.dtype], r.shape) for n, r in self._records.items()}
            self.tied: dict[str, str] = {}
            first: dict[Any, str] = {}
            for name, r in self._records.items():
                kept = first.setdefault((r.storage.key, r.offset, r.shape, r.stride, r.dtype), name)
                if kept != name:
                    self.tied[name] = kept
        except (PickleError, RecursionError) as error:
            self.close()
            raise self._damaged(error) from None
        except BaseException:
            self.close()
            raise

    def _damaged(self, error: Exception) -> DamagedError:
        return DamagedError(f"{self._path} is damaged, or holds objects whose loading would run code: {error}")

    @functools.cached_property
    def others(self) -> dict[str, Any]:
        """The other values of the state dict, by name, and tensors of dtypes that safetensors does not have.

        Raises:
            DamagedError: one is damaged.
        """
        return self._values({name: value for name, value in self._state.items() if name not in self._records})

    @property
    def shapes(self) -> dict[str, tuple[int, ...] | None]:
        """The shape of each value of the state dict; ``None`` if it is no tensor. No value is read."""
        return {name: each.shape if isinstance(each, TensorRecord) else None for name, each in self._state.items()}

    def read(self, name: str, low: int, high: int) -> Tensor:
        record = self._records[name]
        if not record.is_contiguous:
            if name not in self._packed:
                self._packed.clear()
                self._packed[name] = self._spanned(record).contiguous().view(-1).view(torch.uint8)
            return self._packed[name][low:high]
        at = self._begin(record)
        return self._file.read(at + low, at + high)

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        record = self._records[name]
        if record.is_contiguous:
            self._file.read_into(self._begin(record) + low, out)
        else:
            out.copy_(self.read(name, low, low + len(out)))

    def _begin(self, record: TensorRecord) -> int:
        """The offset of the first element of a tensor in the file."""
        return self._places[record.storage.key][0] + record.offset * record.dtype.itemsize

    def finish(self) -> None:
        """The checksums were compared when the file was opened."""

    def state_dict(self) -> dict[str, Any]:
        """The state dict, in memory."""
        return self._values(self._state)

    def _values(self, state: Mapping[str, Any]) -> dict[str, Any]:
        known: dict[int, Any] = {}
        memory: dict[str, Tensor] = {}
        values = {}
        for name, value in state.items():
            try:
                values[name] = self._value(value, known, memory)
            except (PickleError, RecursionError) as error:
                raise DamagedError(f"{self._path}: {name!r} cannot be read: {error}") from None
        return values

    def close(self) -> None:
        self._file.close()

    def _open(self) -> Mapping[str, Any]:
        try:
            pickled = self._open_archive() if zipfile.is_zipfile(self._path) else self._open_legacy()
        except (zipfile.BadZipFile, EOFError, OSError, NotImplementedError, UnicodeError, struct.error) as error:
            # A damaged archive may make zipfile seek to an invalid offset.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise unreadable(self._path, error) from None
            raise DamagedError(f"{self._path} cannot be read; it may be truncated or damaged: {error}") from None
        state, self.versions = pickled.value, valid_versions(pickled.versions)
        if not isinstance(state, dict):
            kind = "tensor" if isinstance(state, TensorRecord) else type(state).__name__
            raise DamagedError(f"{self._path} holds a {kind}, not a state dict")
        for name in state:
            if not isinstance(name, str):
                raise DamagedError(f"{self._path} holds no state dict: {name!r} is not a name")
        return state

    def _open_archive(self) -> Pickled:
        records: dict[str, tuple[int, int]] = {}
        with zipfile.ZipFile(self._path) as archive:
            has_checksums = any(info.CRC for info in archive.infolist())
            for info in archive.infolist():
                records[info.filename.partition("/")[2]] = self._checked_record(info, has_checksums)
        if "byteorder" in records and self._file.bytes_at(*records["byteorder"]) != b"little":
            raise DamagedError(f"{self._path} cannot be read: it was written by a machine of another byte order")
        if "data.pkl" not in records:
            raise DamagedError(f"{self._path} cannot be read: it has no record data.pkl")
        at, length = records["data.pkl"]
        if length > _LONGEST_PICKLE:
            raise DamagedError(f"{self._path} cannot be read: its record data.pkl has {length} bytes")
        self._places = {name[5:]: place for name, place in records.items() if name.startswith("data/")}
        return read_pickle(self._file.bytes_at(at, length))

    def _checked_record(self, info: zipfile.ZipInfo, has_checksum: bool) -> tuple[int, int]:
        """The offset and the length of a record. Raises DamagedError if its checksum is not the archive's."""
        if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
            raise DamagedError(
                f"{self._path} cannot be read: its record {info.filename[:100]!r} is compressed, which torch.save "
                "never does; it has been packed anew"
            )
        head = self._file.bytes_at(info.header_offset, 30)
        if head[:4] != b"PK\3\4":
            raise DamagedError(f"{self._path} cannot be read; it is damaged: {info.filename[:100]!r} is not there")
        begin = info.header_offset + 30 + sum(struct.unpack("<HH", head[26:30]))
        end = begin + info.file_size
        if end > self._file.size:
            raise DamagedError(f"{self._path} cannot be read; it may be truncated: {info.filename[:100]!r}")
        if not has_checksum:
            return begin, info.file_size
        crc = crc32(self._file.bytes_at(begin, min(info.file_size, _SMALL)))
        for at in range(begin + _SMALL, end, CHUNK):
            crc = crc32(view_of(self._file.read(at, min(at + CHUNK, end))), crc)
        if crc != info.CRC:
            raise DamagedError(f"{self._path} cannot be read; it is damaged: bad CRC-32 of {info.filename[:100]!r}")
        return begin, info.file_size

    def _open_legacy(self) -> Pickled:
        data = self._file.bytes_at(0, min(self._file.size, _LONGEST_PICKLE))
        magic, at, *_ = read_pickle(data)
        if magic != _MAGIC:
            raise PickleError("it is no file of torch.save")
        for _ in range(2):  # the version, the machine
            _, at, *_ = read_pickle(data, at)
        pickled = read_pickle(data, at)
        storages = pickled.storages
        keys, at, *_ = read_pickle(data, pickled.end)
        for key in keys if isinstance(keys, list) else ():
            if not isinstance(key, str) or key not in storages:
                raise PickleError("it lists a storage that no tensor has")
            (count,) = struct.unpack("<q", self._file.bytes_at(at, 8))
            nbytes = count * storages[key].dtype.itemsize
            if count < 0 or at + 8 + nbytes > self._file.size:
                raise DamagedError(f"{self._path} cannot be read; it may be truncated")
            self._places[key] = at + 8, nbytes
            at += 8 + nbytes
        return pickled

    def _check(self, name: str, record: TensorRecord) -> None:
        """Raise DamagedError unless the file has memory for every element of a tensor."""
        _, held = self._places.get(record.storage.key, (0, -1))
        size, numel = record.dtype.itemsize, math.prod(record.shape)
        if held < record.storage.nbytes:
            raise DamagedError(f"{self._path} has no memory for {name!r}; it may be damaged")
        last = record.offset + sum((n - 1) * stride for n, stride in zip(record.shape, record.stride))
        if numel and (last + 1) * size > held:
            raise DamagedError(f"{self._path}: {name!r} of shape {record.shape} ends behind its memory of {held} bytes")
        if numel * size > held:
            raise DamagedError(
                f"{self._path} holds a tensor of shape {record.shape} under {name!r}, and {held} bytes for it: it is a "
                "view that repeats its elements"
            )

    def _spanned(self, record: TensorRecord) -> Tensor:
        """A tensor in new memory that spans its first to its last element."""
        size = record.dtype.itemsize
        span = 1 + sum((n - 1) * stride for n, stride in zip(record.shape, record.stride))
        memory = self._memory(self._begin(record), span * size if math.prod(record.shape) else 0)
        return memory.view(record.dtype).as_strided(record.shape, record.stride)

    def _tensor(self, record: TensorRecord, memory: dict[str, Tensor]) -> Tensor:
        """A tensor in the memory of its storage, which is read once."""
        key = record.storage.key
        if key not in memory:
            memory[key] = self._memory(*self._places[key])
        flat = memory[key]
        usable = len(flat) // record.dtype.itemsize * record.dtype.itemsize
        return flat[:usable].view(record.dtype).as_strided(record.shape, record.stride, record.offset)

    def _memory(self, at: int, length: int) -> Tensor:
        """Bytes of the file."""
        memory = torch.empty(length, dtype=torch.uint8, device="cpu")
        for low in range(0, length, CHUNK):
            self._file.read_into(at + low, memory[low : low + CHUNK])
        return memory

    def _value(self, value: Any, known: dict[int, Any], memory: dict[str, Tensor]) -> Any:
        """A value with tensors instead of tensor records.

        Args:
            known: the results for values that were converted already, by identity of the value.
            memory: the storages that were read already, by their keys.
        """
        if id(value) in known:
            return known[id(value)]
        if isinstance(value, TensorRecord):
            self._check("a tensor", value)
            result: Any = self._tensor(value, memory)
        elif isinstance(value, dict):
            result = known[id(value)] = type(value)()
            result.update({key: self._value(each, known, memory) for key, each in value.items()})
        elif isinstance(value, list):
            result = known[id(value)] = []
            result.extend(self._value(each, known, memory) for each in value)
        elif isinstance(value, tuple):
            result = type(value)(self._value(each, known, memory) for each in value)
        elif isinstance(value, OtherTensor):
            raise PickleError(f"it has a tensor that is not plain memory ({value.kind}), which is not read")
        else:
            result = value
        known[id(value)] = result
        return result


def read_state_dict(path: Path) -> dict[str, Any]:
    """The state dict in a ``torch.save`` file, in memory.

    Raises:
        DamagedError: the file is damaged, would run code, or holds no state dict.
    """
    source = PtSource(path)
    try:
        return source.state_dict()
    finally:
        source.close()


def read_shapes(path: Path) -> dict[str, tuple[int, ...] | None]:
    """The names in a ``torch.save`` file, and the shapes of those that are tensors. The values are not kept.

    Raises:
        DamagedError: as for :func:`read_state_dict`.
    """
    source = PtSource(path)
    try:
        return source.shapes
    finally:
        source.close()
