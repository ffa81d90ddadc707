"""The layouts of an optimizer's state tensors, and which shard of each a rank holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Slice, dtensor_like, slice_of

from .experts import experts_of


@dataclass(frozen=True)
class Size:
    """The length of a dimension of a state tensor that the parameter does not have, and that is not sharded."""

    size: int


@dataclass(frozen=True)
class StateTensor:
    """The layout of one state tensor, dimension by dimension.

    Each of ``dims`` is a dimension of the parameter (0, 1, …), which is sharded as that one is, or a :class:`Size`,
    which is not sharded. For a parameter of shape (R, C), ``(0, 1)`` is a moment, ``(0,)`` a number per row, ``(1,)``
    one per column, ``()`` one number, and ``(Size(k), 1)`` k numbers per column. Ranks that hold the same part of a
    tensor have equal values. Where the rows of packed experts are counted along two dimensions, the ranks' parts of a
    tensor without the second dimension overlap: each rank has the experts of which it holds rows.

    Attributes:
        dims: as above. The parameter's dimension 0 may only come first.
        dtype: of the tensor.
        fill: the first value of its elements.
        kind: numbers that say what the elements are. A state does not fit a layout in which they differ.
    """

    dims: tuple[int | Size, ...]
    dtype: torch.dtype = torch.float32
    fill: float = 0
    kind: tuple[int, ...] = ()

    def part(self, where: Slice) -> Slice:
        """The part of the state tensor on the rank that holds ``where`` of the parameter.

        Raises:
            ValueError: the parameter's dimension 0 is not the first, so that the part is no :class:`Slice`.
        """
        if self.dims == tuple(range(len(where.shape))):
            return where
        if 0 in self.dims[1:]:
            raise ValueError(f"dims={self.dims} have the parameter's dimension 0, which ranks shard, not in front")
        shape = tuple(d.size if isinstance(d, Size) else where.shape[d] for d in self.dims)
        tp: dict[str, Any] = {}
        if where.tp_dim is not None and where.tp_dim in self.dims:
            tp = {
                "tp_dim": self.dims.index(where.tp_dim),
                "tp_offset": where.tp_offset,
                "tp_extent": where.tp_extent,
                "tp_comm": where.tp_comm,
                "tp_blocks": where.tp_blocks,
            }
        if self.dims[:1] == (0,):
            start, stop, rows = where.row_start, where.row_stop, where.row_dims
            if rows > 1 and self.dims[1:2] != (1,):  # a number for all rows of an expert
                experts = experts_of(where)
                start, stop, rows = experts.start, experts.stop, 1
            return Slice(shape, start, stop, where.row_comm, **tp, row_dims=rows)
        rows = Slice(shape, 0, 0, None, **tp).tp_shard_rows
        return Slice(shape, 0, rows, None, **tp)

    def as_dtensor(self, local: Tensor, param: Tensor) -> Tensor:
        """This rank's part of the state tensor of ``param``, a ``DTensor``, as a ``DTensor`` on the same memory."""
        return dtensor_like(local, self.part(slice_of(param)), param)


def like_parameter(shape: Sequence[int]) -> StateTensor:
    """One number per element, such as a moment or a master weight."""
    return StateTensor(tuple(range(len(shape))))


def row_statistic(shape: Sequence[int]) -> StateTensor:
    """One number per row of the matrices of the last two dimensions: shape (\\*, R)."""
    return StateTensor(tuple(range(len(shape) - 1)))


def column_statistic(shape: Sequence[int]) -> StateTensor:
    """One number per column of the matrices of the last two dimensions: shape (\\*, C)."""
    return StateTensor((*range(len(shape) - 2), len(shape) - 1))


def per_parameter() -> StateTensor:
    """One number."""
    return StateTensor(())


def replicated(shape: Sequence[int]) -> StateTensor:
    """A tensor of its own shape that all ranks have, such as a projector."""
    return StateTensor(tuple(Size(n) for n in shape))
