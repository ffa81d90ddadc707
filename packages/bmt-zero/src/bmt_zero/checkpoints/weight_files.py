"""Writing one file of weights in parts, as safetensors or in the format of ``torch.save``."""

from __future__ import annotations

import io
import os
import pickle
import struct
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from bmt_comm.durable import complete_file

from .headers import Entry, FileLayout, dtype_name, lay_out_file
from .memory import view_of
from .pickles import STORAGES, PickleError, read_pickle
from .writer import write_all

_ALIGNMENT = 64
_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


class WeightFile(Protocol):
    """A file that will be written. Values that are not tensors are those at the time of construction."""

    def open(self, path: Path) -> None:
        """Create the file, or truncate it."""
        ...

    def write(self, name: str, at: int, content: Tensor) -> None:
        """Write the bytes (uint8, 1-D, on the CPU) of a tensor from byte ``at`` on. The parts of a tensor must be
        written in order, and before other tensors."""
        ...

    def close(self) -> None:
        """Close the file, after everything was written. It may not be on the disk yet."""
        ...

    def abort(self) -> None:
        """Close an incomplete file. Nothing is raised."""
        ...


class SafetensorsFile:
    """A file with the tensors of a layout."""

    def __init__(self, layout: FileLayout) -> None:
        self._head = layout.head
        self._offsets = {entry.name: offset for entry, offset in zip(layout.entries, layout.offsets)}
        self._handle: int | None = None

    def open(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        write_all(self._handle, memoryview(self._head), 0)

    def write(self, name: str, at: int, content: Tensor) -> None:
        assert self._handle is not None
        write_all(self._handle, view_of(content), self._offsets[name] + at)

    def close(self) -> None:
        if self._handle is not None:
            handle, self._handle = self._handle, None
            os.close(handle)

    def abort(self) -> None:
        with suppress(OSError):
            self.close()


class Placeholder:
    """Stands for a tensor in the state of a :func:`weight_file`. Tied tensors are one placeholder."""

    def __init__(self, name: str, shape: tuple[int, ...], dtype: Any) -> None:
        self.name, self.shape, self.dtype = name, tuple(shape), dtype  # of type torch.dtype

    def __reduce__(self) -> Any:
        stride = torch.empty(self.shape, device="meta").stride()
        arguments: tuple[Any, ...] = (_Memory(self), 0, self.shape, stride, False, OrderedDict())
        if self.dtype in _STORAGE_OF:
            return torch._utils._rebuild_tensor_v2, arguments
        return torch._utils._rebuild_tensor_v3, (*arguments, self.dtype)

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class _Memory:
    def __init__(self, owner: Placeholder) -> None:
        self.owner = owner


class _Pickler(pickle.Pickler):
    """Replaces storages by the keys of their records."""

    def __init__(self, file: Any) -> None:
        super().__init__(file, protocol=2)
        self.keys: dict[str, tuple[str, int]] = {}  # of a placeholder, by its name: the record and its length
        self.copies: dict[str, Tensor] = {}  # copies of the storages of other tensors, by the record

    def persistent_id(self, each: Any) -> Any:
        if isinstance(each, _Memory):
            owner = each.owner
            key, _ = self.keys.setdefault(owner.name, (str(len(self.keys) + len(self.copies)), owner.nbytes))
            name = _STORAGE_OF.get(owner.dtype, "UntypedStorage")
            return "storage", getattr(torch, name), key, "cpu", owner.nbytes // STORAGES[name].itemsize
        if isinstance(each, (torch.TypedStorage, torch.UntypedStorage)):
            untyped = each._untyped_storage if isinstance(each, torch.TypedStorage) else each
            name = _STORAGE_OF.get(getattr(each, "dtype", None), "UntypedStorage")  # type: ignore[arg-type]
            key = str(len(self.keys) + len(self.copies))
            self.copies[key] = torch.empty(0, dtype=torch.uint8, device="cpu").set_(untyped.cpu()).clone()
            return "storage", getattr(torch, name), key, "cpu", untyped.nbytes() // STORAGES[name].itemsize
        return None


class PtFile:
    """A file that ``torch.load`` reads.

    Args:
        state: a :class:`Placeholder` for each tensor that will be written, and other values. These are pickled now, and
            tensors in them are copied.

    Raises:
        Exception: what pickling a value raises.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        described = io.BytesIO()
        self._pickler = _Pickler(described)
        self._pickler.dump(state)
        self._content = described.getvalue()
        self._left = 0
        try:
            read_pickle(self._content)
        except PickleError as error:
            warnings.warn(
                f"the state dict has in it what only torch.load(..., weights_only=False) reads again: {error}; let "
                "get_extra_state return plain values and tensors",
                stacklevel=2,
            )

    def open(self, path: Path) -> None:
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_STORED)
        self._add("data.pkl", self._content)
        self._add("byteorder", b"little")

    def write(self, name: str, at: int, content: Tensor) -> None:
        if at == 0:
            key, nbytes = self._pickler.keys[name]
            self._begin(f"data/{key}", nbytes)
        self._record.write(view_of(content))
        self._left -= len(content)
        if not self._left:
            self._record.close()

    def close(self) -> None:
        for key, tensor in self._pickler.copies.items():
            self._add(f"data/{key}", view_of(tensor))
        self._add("version", b"3\n")
        self._archive.close()

    def abort(self) -> None:
        # Closing writes to the file, which may raise again.
        for each in ("_record", "_archive"):
            with suppress(AttributeError, OSError, ValueError, RuntimeError):
                getattr(self, each).close()

    def _add(self, name: str, content: Any) -> None:
        self._begin(name, len(content))
        self._record.write(content)
        self._record.close()

    def _begin(self, name: str, nbytes: int) -> None:
        """Begin a record. Its content is aligned as in torch's files, so that mapped tensors are aligned."""
        assert self._archive.fp is not None
        info = zipfile.ZipInfo(f"archive/{name}")
        info.file_size = nbytes
        is_long = nbytes * 1.05 > zipfile.ZIP64_LIMIT
        begin = self._archive.fp.tell() + 30 + len(info.filename) + 4 + 20 * is_long
        info.extra = struct.pack("<2sH", b"FB", -begin % _ALIGNMENT) + b"Z" * (-begin % _ALIGNMENT)
        self._record, self._left = self._archive.open(info, "w", force_zip64=is_long), nbytes


def write_weights(file: WeightFile, path: Path, tensors: Iterable[tuple[str, Iterable[Tensor]]]) -> None:
    """Write a file. It appears under its name when it is complete and on the disk.

    Args:
        tensors: the name of each tensor, and its bytes in parts: uint8, 1-D, on the CPU.
    """
    with complete_file(path) as part:
        try:
            file.open(part)
            for name, parts in tensors:
                at = 0
                for content in parts:
                    file.write(name, at, content)
                    at += len(content)
            file.close()
        finally:
            file.abort()


def weight_file(path: Path, state: Mapping[str, Any]) -> WeightFile:
    """The file to write to a path: safetensors if the name ends in ``.safetensors``, else the format of ``torch.save``.

    Args:
        state: a :class:`Placeholder` for each tensor, and other values.

    Raises:
        ValueError: safetensors cannot hold something.
    """
    if path.suffix != ".safetensors":
        return PtFile(state)
    entries = []
    for name, each in state.items():
        if not isinstance(each, Placeholder):
            raise ValueError(f"{name!r} is no tensor, and safetensors holds tensors only; use .pt")
        entries.append(Entry(name, dtype_name(each.dtype, name), each.shape))
    return SafetensorsFile(lay_out_file(path.name, entries))
