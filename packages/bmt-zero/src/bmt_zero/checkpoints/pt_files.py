"""Files of ``torch.save`` as sources of tensors: only tensors and plain values, and only if the checksums hold."""

from __future__ import annotations

import pickle
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .headers import DamagedError, Entry, dtype_name
from .regions import flat_bytes

_LARGEST_PICKLE = 1 << 28


def check_archive(path: Path) -> None:
    """Raise unless every record of a ``torch.save`` file has the checksum that the archive has for it.

    ``torch.load`` compares no checksums where it maps a file into memory, and reads past records that have been
    compressed.

    Raises:
        DamagedError: the file is no such archive, is truncated, or has changed.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            for info in archive.infolist():
                if info.compress_type != zipfile.ZIP_STORED or info.compress_size != info.file_size:
                    raise DamagedError(
                        f"{path} cannot be read: its record {info.filename!r} is compressed, which torch.save never "
                        "does; it has been packed anew"
                    )
                if info.filename.endswith("data.pkl") and info.file_size > _LARGEST_PICKLE:
                    raise DamagedError(f"{path} cannot be read: its record {info.filename!r} is {info.file_size} long")
                with archive.open(info) as record:
                    while record.read(1 << 20):
                        pass
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError, RuntimeError) as error:
        if isinstance(error, DamagedError):
            raise
        raise DamagedError(f"{path} cannot be read; it may be truncated or damaged: {error}") from None


def read_state_dict(path: Path) -> Mapping[str, Any]:
    """The state dict in a ``torch.save`` file; its tensors stay on the disk until they are used.

    Raises:
        DamagedError: the file is damaged, would run code, or holds no state dict.
    """
    try:
        is_archive = zipfile.is_zipfile(path)  # not so of torch's format before 1.6
    except OSError as error:
        raise DamagedError(f"{path} cannot be read: {error.strerror}") from None
    if is_archive:
        check_archive(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_archive)
    except pickle.UnpicklingError as error:
        first = str(error).partition("\n")[0]
        raise DamagedError(f"{path} is damaged, or holds objects whose loading would run code: {first}") from None
    except Exception as error:  # a damaged file can fail anywhere in the reader
        first = str(error).partition("\n")[0]
        raise DamagedError(f"{path} cannot be read: {type(error).__name__}: {first}") from None
    if not isinstance(state, Mapping):
        raise DamagedError(f"{path} holds a {type(state).__name__}, not a state dict")
    for name, value in state.items():
        if not isinstance(name, str):
            raise DamagedError(f"{path} holds no state dict: {name!r} is not a name")
        if isinstance(value, Tensor):
            check_plain(path, name, value)
    return state


def check_plain(path: Path, name: str, value: Tensor) -> None:
    """Raise DamagedError unless a tensor is dense and has memory for every element that it tells of."""
    if value.layout is not torch.strided or value.is_quantized or value.is_meta:
        raise DamagedError(f"{path} holds no plain tensor under {name!r}, but one of {value.layout} on {value.device}")
    memory = value.untyped_storage().nbytes()
    if value.numel() * value.element_size() > memory:
        raise DamagedError(
            f"{path} holds a tensor of shape {tuple(value.shape)} under {name!r}, and {memory} bytes for it: it is a "
            "view that repeats its elements"
        )


class PtSource:
    """The tensors of a ``torch.save`` file; see :class:`~bmt_zero.checkpoints.sources.Source`."""

    def __init__(self, path: Path) -> None:
        self._tensors = {name: value for name, value in read_state_dict(path).items() if isinstance(value, Tensor)}
        self.entries = {
            name: Entry(name, dtype_name(value.dtype, name), tuple(value.shape))
            for name, value in self._tensors.items()
        }

    def read(self, name: str, low: int, high: int) -> Tensor:
        tensor = self._tensors[name]
        if not tensor.is_contiguous():
            tensor = self._tensors[name] = tensor.contiguous()
        return flat_bytes(tensor)[low:high]

    def expect(self, name: str, low: int, high: int) -> None:
        """The file is mapped into memory; the system reads ahead by itself."""

    def read_into(self, name: str, low: int, out: Tensor) -> None:
        out.copy_(self.read(name, low, low + len(out)))

    def close(self) -> None:
        self._tensors.clear()
