"""The description of a communicator's operation, which ranks compare."""

from __future__ import annotations

import zlib
from typing import NamedTuple

import torch

_KNOWN_AT_MOST = 4096


class Operation(NamedTuple):
    """An operation that ranks do together.

    Attributes:
        number: how many operations the process group has begun, this one included; the same on all its ranks.
        name: the kind, the reduction or root, dtype, shape, and label; the same on all its ranks.
        tag: some bits of a hash of ``name``, for messages of which only the tags are compared.
    """

    number: int
    name: bytes
    tag: int


TAG_BITS = 12
_known: dict[tuple[object, ...], tuple[bytes, int]] = {}


def describe(kind: str, detail: object, dtype: torch.dtype, shape: torch.Size, label: str) -> tuple[bytes, int]:
    """The name and the tag of an operation.

    ``detail`` is the reduction or the root, and ``label`` says what the operation is for.
    """
    key = (kind, detail, dtype, shape, label)
    description = _known.get(key)
    if description is None:
        if len(_known) >= _KNOWN_AT_MOST:
            _known.clear()
        text = f"{kind} {detail}".rstrip() + f" of {str(dtype).removeprefix('torch.')} {tuple(shape)}"
        name = (f"{text} for {label}" if label else text).encode()
        description = _known[key] = name, zlib.crc32(name) & ((1 << TAG_BITS) - 1)
    return description
