"""The safetensors format: layouts of files from names, dtypes and shapes, and the parsing of headers.

A file is 8 bytes with the length of the header (little-endian), the header (JSON, padded with spaces) and the tensors'
bytes, one tensor after the other, each in row-major order.
"""

from __future__ import annotations

import errno
import itertools
import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bmt_zero.stage_entry import natural_key

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
    **({"F8_E8M0": torch.float8_e8m0fnu} if hasattr(torch, "float8_e8m0fnu") else {}),  # from torch 2.7 on
}
"""The dtypes of the format, by the format's names."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
"""What a header has beside tensors. No tensor may have this name."""
LONGEST_HEADER = 100_000_000
"""The most bytes of a header: the limit of the safetensors package."""
MAX_FILE_SIZE = 5 * 10**9
"""The most bytes of tensors in a file, unless one tensor alone has more."""


class DamagedError(ValueError):
    """A file is truncated, changed, missing, or of an unknown format."""


_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO}


def unreadable(path: object, error: OSError) -> Exception:
    """The error to raise for a file that cannot be read: DamagedError if it is missing, else an OSError that names it.

    An input/output error, for example, is a fault of the disk or of the connection to it. The file may be undamaged.
    """
    if error.errno in _ABSENT:
        return DamagedError(f"{path} cannot be read: {error.strerror}")
    return OSError(error.errno, error.strerror, str(path))


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: its name, dtype (by the format's name) and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def __str__(self) -> str:
        return f"{self.name!r} of shape {self.shape} and dtype {self.dtype}"


def dtype_name(dtype: torch.dtype, name: str) -> str:
    """The format's name of a dtype.

    Raises:
        ValueError: the format has no such dtype. The message has ``name``, the name of the tensor.
    """
    if dtype not in NAMES:
        raise ValueError(
            f"{name!r} has dtype {dtype}, which safetensors files cannot hold; convert it, or leave it out"
        )
    return NAMES[dtype]


@dataclass(frozen=True)
class FileLayout:
    """The tensors of one file and their offsets.

    Attributes:
        name: of the file.
        head: the bytes before the tensors: the length, and the padded header.
        entries: the tensors, in the order of the file.
        offsets: the first byte of each tensor, from the start of the file.
        size: of the file, in bytes.
        section: the section that the file belongs to: "model", for example.
    """

    name: str
    head: bytes
    entries: tuple[Entry, ...]
    offsets: tuple[int, ...]
    size: int
    section: str = ""


def lay_out_file(name: str, entries: Iterable[Entry], section: str = "") -> FileLayout:
    """The layout of one file. Tensors with larger elements come first, so that each is aligned to its element size.

    Raises:
        ValueError: a name that the format reserves.
    """
    ordered = sorted(entries, key=lambda entry: (-entry.itemsize, natural_key(entry.name)))
    if any(entry.name == METADATA for entry in ordered):
        raise ValueError(f"safetensors files have no tensors of the name {METADATA!r}; rename it")
    header: dict[str, Any] = {METADATA: {"format": "pt"}}
    starts, end = [], 0
    for entry in ordered:
        starts.append(end)
        end += entry.nbytes
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [starts[-1], end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    offsets = tuple(len(head) + start for start in starts)
    return FileLayout(name, head, tuple(ordered), offsets, len(head) + end, section)


def lay_out(section: str, entries: Iterable[Entry], max_file_size: int = MAX_FILE_SIZE) -> list[FileLayout]:
    """The layouts of files ``<section>-00001-of-0000n.safetensors`` for all entries, in the order of their names.

    Raises:
        ValueError: a name occurs twice, or is reserved.
    """
    ordered = sorted(entries, key=lambda entry: natural_key(entry.name))
    for before, after in itertools.pairwise(ordered):
        if before.name == after.name:
            raise ValueError(f"there are two tensors {after.name!r}: {before} and {after}")
    groups: list[list[Entry]] = []
    size = 0
    for entry in ordered:
        if not groups or size + entry.nbytes > max_file_size:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.nbytes
    names = [f"{section}-{n:05}-of-{len(groups):05}.safetensors" for n in range(1, len(groups) + 1)]
    return [lay_out_file(name, group, section) for name, group in zip(names, groups)]


def index_of(files: Sequence[FileLayout]) -> bytes:
    """The text of Hugging Face's ``<section>.safetensors.index.json``, which maps tensors to files."""
    weights = {entry.name: file.name for file in files for entry in file.entries}
    total = sum(entry.nbytes for file in files for entry in file.entries)
    ordered = {name: weights[name] for name in sorted(weights, key=natural_key)}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": ordered}, indent=2).encode()


def parse_head(path: object, head: bytes, file_size: int) -> FileLayout:
    """The layout of a file, from its first bytes, which must include the header.

    Args:
        path: of the file, for messages.

    Raises:
        DamagedError: the header is invalid or does not fit a file of ``file_size`` bytes.
    """
    length = header_length(path, head[:8], file_size)
    header = parse_json(path, head[8 : 8 + length])
    if not isinstance(header, dict):
        raise DamagedError(f"{path}: the header is a {type(header).__name__}, not an object")
    data = 8 + length
    spans = []
    for name, fields in header.items():
        if name == METADATA:
            continue
        spans.append(_parse_entry(path, name, fields))
    spans.sort(key=lambda item: (item[1], item[2]))
    end = 0
    for entry, start, stop in spans:
        if start != end:
            raise DamagedError(f"{path}: {entry.name!r} begins at byte {start} of the data, and {end} is the next one")
        end = stop
    if data + end != file_size:
        raise DamagedError(f"{path} has {file_size} bytes, and by its header it has {data + end}; it may be truncated")
    entries = tuple(entry for entry, _, _ in spans)
    return FileLayout(str(path), head[:data], entries, tuple(data + start for _, start, _ in spans), file_size)


def header_length(path: object, first: bytes, file_size: int) -> int:
    """The length of the header, from the first 8 bytes of a file.

    Raises:
        DamagedError: a header of this length does not fit into the file.
    """
    if len(first) < 8:
        raise DamagedError(f"{path} has {file_size} bytes, too few for a safetensors file; it may be truncated")
    (length,) = struct.unpack("<Q", first)
    if length > LONGEST_HEADER or 8 + length > file_size:
        raise DamagedError(f"{path}: a header of {length} bytes does not fit into a file of {file_size}")
    return int(length)


def _parse_entry(path: object, name: str, fields: Any) -> tuple[Entry, int, int]:
    if not isinstance(fields, dict) or fields.keys() != {"dtype", "shape", "data_offsets"}:
        raise DamagedError(f"{path}: the header says nothing usable of {name!r}: {str(fields)[:100]}")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise DamagedError(f"{path}: {name!r} has the dtype {str(dtype)[:40]!r}; known are {', '.join(DTYPES)}")
    if not _are_sizes(shape) or len(shape) > 64:
        raise DamagedError(f"{path}: {name!r} has the shape {str(shape)[:100]}")
    if not _are_sizes(offsets) or len(offsets) != 2:
        raise DamagedError(f"{path}: {name!r} has the offsets {str(offsets)[:100]}")
    entry = Entry(name, dtype, tuple(shape))
    start, stop = offsets
    if stop - start != entry.nbytes:
        raise DamagedError(f"{path}: {entry} has {entry.nbytes} bytes, and the header gives it {stop - start}")
    return entry, start, stop


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(number) is int and 0 <= number < 1 << 62 for number in value)


def parse_json(path: object, text: bytes) -> Any:
    """A JSON document in which no name occurs twice in an object.

    Raises:
        DamagedError: the text is not such a document.
    """
    try:
        return json.loads(text.decode(), object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"{path} is damaged: {error}") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name comes twice")
    return result
