"""Numbers packed into 8 bits, with a scale for each block, in one buffer that can be sent. Uses bmt_kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGNMENT = 16  # bytes; scales begin on multiples of it


@dataclass(frozen=True)
class Packing:
    """How numbers are packed.

    Attributes:
        kind: "int8" or "float8"; see :func:`bmt_kernels.pack_blocks`.
        block: how many numbers share a scale.
    """

    kind: str
    block: int

    def __str__(self) -> str:
        return f"{self.kind} in blocks of {self.block}"

    def bytes(self, numel: int) -> int:
        """The length of a buffer for ``numel`` numbers."""
        return _aligned(_aligned(numel) + 4 * -(-numel // self.block))

    def pack(self, packed: Tensor, values: Tensor) -> None:
        """Write ``values``, (numel,) of float32, bfloat16 or float16, into ``packed``, (bytes(numel),) of uint8."""
        kernels().pack_blocks(values, *self._parts(packed, values.numel()), kind=self.kind, block=self.block)

    def unpack(self, values: Tensor, packed: Tensor, add: bool = False) -> None:
        """Unpack the numbers that :meth:`pack` has packed into ``values`` (numel,), or add them to ``values``."""
        parts = self._parts(packed, values.numel())
        kernels().unpack_blocks(*parts, values, kind=self.kind, block=self.block, add=add)

    def add_up(self, out: Tensor, packed: Sequence[Tensor], place: int, mine: Tensor) -> None:
        """Write the sum of ``packed``, in their order, into ``out``, (numel,) of float32.

        ``mine``, which is not packed, takes the place of the entry at index ``place``.
        """
        for number, each in enumerate(packed):
            if number != place:
                self.unpack(out, each, add=number > 0)
            elif number == 0:
                out.copy_(mine)
            else:
                out.add_(mine)

    def _parts(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        begin, count = _aligned(numel), -(-numel // self.block)
        return packed[:numel], packed[begin : begin + 4 * count].view(torch.float32)


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
