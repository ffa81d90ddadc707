"""Sharded state in 8 bits: blocks of the logical tensor, whichever ranks hold their elements.

[Note: blocks and shards]
    A state tensor in 8 bits consists of codes, one byte per element, and of the *absmax* of each block of 256 elements,
    its largest magnitude. Blocks are counted in the row-major order of the logical tensor, so that its state is the
    same however it is sharded. A rank holds some *rows* of the logical tensor: all of their columns, or only some
    (tensor parallelism); consecutive rows, or scattered ones (fused weights). It has the absmax of every block that
    contains elements of those rows.

    Shards that end at a multiple of 256 elements share no block. Otherwise several ranks hold elements of one block.
    Its absmax is then the largest over these ranks, which takes a round, and each of them quantises its elements by it.
    :func:`shares_blocks` tells which case applies, from what all ranks know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import Communicator, Slice, dtensor_like, slice_of

from .slices import indices_along, row_indices, unshard
from .state_layout import StateTensor

BLOCK = 256
"""Elements of a block, as in ``bmt_kernels.quantize_blockwise``."""


@dataclass(frozen=True)
class Span:
    """The range of a logical tensor's elements, in row-major order, that contains all elements of a part.

    Attributes:
        start, stop: of the range.
        shape: the shape of these elements as rows.
        dim: the dimension of that shape along which the part has only some elements; ``None``: it has all.
    """

    start: int
    stop: int
    shape: tuple[int, ...]
    dim: int | None

    @property
    def first(self) -> int:
        """The first block."""
        return self.start // BLOCK

    @property
    def last(self) -> int:
        """After the last block."""
        return -(-self.stop // BLOCK) if self.stop > self.start else self.first

    @property
    def offset(self) -> int:
        """The offset of the first element in its block."""
        return self.start % BLOCK


def span_of(part: Slice) -> Span:
    """The span of a part."""
    row_shape = part.shape[part.row_dims :]
    start, stop, dim = part.row_start, part.row_stop, None
    if part.tp_dim is not None and part.tp_extent < part.shape[part.tp_dim]:
        if part.tp_dim >= part.row_dims:
            dim = part.tp_dim - part.row_dims + 1
        elif part.tp_blocks or part.tp_dim > 0:  # scattered rows
            start, stop, dim = 0, math.prod(part.shape[: part.row_dims]), 0
        else:
            first = part.tp_offset * math.prod(part.shape[1 : part.row_dims])
            start, stop = first + start, first + stop
    row = math.prod(row_shape)
    return Span(start * row, stop * row, (stop - start, *row_shape) if part.shape else part.local_shape, dim)


def block_count(shape: tuple[int, ...]) -> int:
    """The number of blocks of a logical tensor."""
    return -(-math.prod(shape) // BLOCK)


_NUMBER = StateTensor(())


@dataclass(frozen=True)
class BlockAbsmax(StateTensor):
    """The layout of the absmax of codes: one number per block. Several ranks may have that of one block."""

    codes: StateTensor = _NUMBER

    def part(self, where: Slice) -> Slice:
        """The range of blocks that this rank has. Ranges of neighbours overlap where they share a block."""
        codes = self.codes.part(where)
        span, shape = span_of(codes), (block_count(codes.shape),)
        if span.dim == 0:
            return Slice(shape, 0, shape[0])
        if span.dim is None and codes.tp_dim == 0:
            row = math.prod(codes.shape[1:])  # what follows dimension 0
            tp_span = Span(codes.tp_offset * row, (codes.tp_offset + codes.tp_extent) * row, (), None)
            rows = span.first - tp_span.first, span.last - tp_span.first
            return Slice(shape, *rows, codes.row_comm, 0, tp_span.first, tp_span.last - tp_span.first, codes.tp_comm)
        return Slice(shape, span.first, span.last, codes.row_comm)

    def as_dtensor(self, local: Tensor, param: Tensor) -> Tensor:
        """The unsharded absmax, replicated: no placement has overlapping ranges. All ranks must call this."""
        unsharded = unshard(local, self.part(slice_of(param)))
        return dtensor_like(unsharded, Slice(tuple(unsharded.shape), 0, len(unsharded)), param)


def absmax_layout(codes: StateTensor) -> BlockAbsmax:
    """The layout of the absmax of ``codes``."""
    return BlockAbsmax((), codes=codes)


def shares_blocks(part: Slice) -> bool:
    """Whether several ranks may hold elements of one block. The same on all ranks that share the tensor."""
    aligned = math.prod(part.shape[part.row_dims :]) % BLOCK == 0
    if _is_sharded(part.tp_comm) and (part.tp_dim != 0 or part.tp_blocks):
        return True
    return (_is_sharded(part.row_comm) or _is_sharded(part.tp_comm)) and not aligned


def _is_sharded(comm: Communicator | None) -> bool:
    return comm is not None and comm.size > 1


def dequantise(codes: Tensor, absmax: Tensor, part: Slice, signed: bool) -> Tensor:
    """The numbers that ``codes`` (of the part's local shape) stand for: fp32, of that shape."""
    span = span_of(part)
    if span.dim is None:
        return bmt_kernels.dequantize_blockwise(codes, absmax, signed=signed, block_offset=span.offset)
    index = _held(part, span.dim, codes.device)
    rows = codes.new_zeros(span.shape).index_copy_(span.dim, index, codes)
    values = bmt_kernels.dequantize_blockwise(rows, absmax, signed=signed, block_offset=span.offset)
    return values.index_select(span.dim, index)


def local_absmax(values: Tensor, part: Slice) -> Tensor:
    """The absmax of this rank's elements of each of its blocks; NaN if one is not finite."""
    span = span_of(part)
    blocks = values.new_zeros(span.last - span.first, BLOCK)
    _put(blocks, values, span, part)
    return finite_absmax(blocks)


def finite_absmax(blocks: Tensor) -> Tensor:
    """The largest magnitude of each row; NaN if one is not finite."""
    largest = blocks.abs().amax(dim=1)
    return torch.where(largest.isfinite(), largest, torch.nan)


def quantise(values: Tensor, absmax: Tensor, part: Slice, signed: bool) -> Tensor:
    """Codes of ``values`` (fp32, of the part's local shape), by the ``absmax`` of the blocks over all ranks."""
    span = span_of(part)
    # Elements of other ranks are filled with the absmax, so that the kernel computes the same absmax.
    blocks = absmax[:, None].repeat(1, BLOCK)
    _put(blocks, values, span, part)
    codes, _ = bmt_kernels.quantize_blockwise(blocks, signed=signed)
    rows = _rows(codes, span)
    return rows if span.dim is None else rows.index_select(span.dim, _held(part, span.dim, codes.device))


def _put(blocks: Tensor, values: Tensor, span: Span, part: Slice) -> None:
    rows = _rows(blocks, span)
    if span.dim is None:
        rows.copy_(values)
    else:
        rows.index_copy_(span.dim, _held(part, span.dim, values.device), values)


def _held(part: Slice, dim: int, device: torch.device) -> Tensor:
    """This rank's indices along ``dim`` of the span's shape."""
    return row_indices(part, device) if dim == 0 else indices_along(part, dim + part.row_dims - 1, device)


def _rows(blocks: Tensor, span: Span) -> Tensor:
    """The part's rows as a view of blocks (blocks, 256)."""
    if not len(blocks):
        return blocks.view(span.shape)
    return blocks.view(-1)[span.offset : span.offset + span.stop - span.start].view(span.shape)
