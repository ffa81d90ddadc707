"""Numbers in 8 bits, with a scale for each block, in one buffer that can be sent: bmt_kernels makes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; scales begin on multiples of it


def packed_bytes(numel: int, block: int) -> int:
    """The length of a buffer for ``numel`` numbers in blocks of ``block``."""
    return _aligned(_aligned(numel) + 4 * -(-numel // block))


def pack(packed: Tensor, values: Tensor, kind: str, block: int) -> None:
    """Write ``values`` (numel,) into ``packed``, (packed_bytes(numel, block),) of uint8.

    ``kind`` is "int8" or "float8"; see :func:`bmt_kernels.pack_blocks`.
    """
    kernels().pack_blocks(values, *_parts(packed, values.numel(), block), kind=kind, block=block)


def unpack(values: Tensor, packed: Tensor, kind: str, block: int, add: bool = False) -> None:
    """Write what :func:`pack` has packed into ``values`` (numel,), or add it."""
    kernels().unpack_blocks(*_parts(packed, values.numel(), block), values, kind=kind, block=block, add=add)


def kernels() -> Any:
    """The module bmt_kernels.

    Raises:
        RuntimeError: it is not installed.
    """
    try:
        import bmt_kernels
    except ImportError:
        raise RuntimeError("compressed communication needs bmt-kernels: pip install bmt-kernels") from None
    return bmt_kernels


def _aligned(count: int) -> int:
    return -(-count // _ALIGNMENT) * _ALIGNMENT


def _parts(packed: Tensor, numel: int, block: int) -> tuple[Tensor, Tensor]:
    begin, count = _aligned(numel), -(-numel // block)
    return packed[:numel], packed[begin : begin + 4 * count].view(torch.float32)
