"""State in 8 bits over shards: blocks of the logical tensor, whichever ranks hold their elements.

[Note: blocks and cuts]
    A state tensor in 8 bits consists of codes, one byte per element, and of *maxima*, the largest magnitude of each
    block of 256 elements. Blocks are counted in the row-major order of the logical tensor, so that its state is the
    same however it is cut. What a rank holds are some *rows* of the logical tensor, of which it may have some
    columns only (tensor parallelism), or rows here and there (fused weights). It has the maxima of all blocks that
    those rows lie in.

    A cut between rows of a multiple of 256 elements is one between blocks. Any other cut leaves a block whose
    elements several ranks hold. Its maximum is then the largest of theirs, which takes a round, and each of them
    quantises what it has by it. :func:`shares_blocks` tells which it is, from what all ranks know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import Communicator, Slice, dtensor_like, slice_of

from .slices import assemble, indices_along, row_indices
from .state_layout import StateTensor

BLOCK = 256
"""Elements of a block, as in ``bmt_kernels.quantize_blockwise``."""


@dataclass(frozen=True)
class Span:
    """The consecutive elements of a logical tensor, in row-major order, among which a part's elements are.

    Attributes:
        start, stop: of the elements.
        shape: of the rows that they are.
        dim: of that shape, along which the part has only some of them; ``None``: it has them all.
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
        """Of the first element in its block."""
        return self.start % BLOCK


def span_of(part: Slice) -> Span:
    """Where a part is."""
    row_shape = part.shape[part.row_dims :]
    start, stop, dim = part.row_start, part.row_stop, None
    if part.tp_dim is not None and part.tp_extent < part.shape[part.tp_dim]:
        if part.tp_dim >= part.row_dims:
            dim = part.tp_dim - part.row_dims + 1
        elif part.tp_blocks or part.tp_dim > 0:  # rows here and there
            start, stop, dim = 0, math.prod(part.shape[: part.row_dims]), 0
        else:
            first = part.tp_offset * math.prod(part.shape[1 : part.row_dims])
            start, stop = first + start, first + stop
    row = math.prod(row_shape)
    return Span(start * row, stop * row, (stop - start, *row_shape) if part.shape else part.local_shape, dim)


def block_count(shape: tuple[int, ...]) -> int:
    """Of a logical tensor."""
    return -(-math.prod(shape) // BLOCK)


_NUMBER = StateTensor(())


@dataclass(frozen=True)
class BlockMaxima(StateTensor):
    """The layout of the maxima that belong to codes: one number per block, of which ranks may have the same."""

    codes: StateTensor = _NUMBER

    def part(self, where: Slice) -> Slice:
        """The range of blocks that this rank has. Ranges of neighbours overlap where they share a block."""
        codes = self.codes.part(where)
        span, shape = span_of(codes), (block_count(codes.shape),)
        if span.dim == 0:
            return Slice(shape, 0, shape[0])
        if span.dim is None and codes.tp_dim == 0:
            row = math.prod(codes.shape[1:])  # what follows dimension 0
            piece = Span(codes.tp_offset * row, (codes.tp_offset + codes.tp_extent) * row, (), None)
            rows = span.first - piece.first, span.last - piece.first
            return Slice(shape, *rows, codes.row_comm, 0, piece.first, piece.last - piece.first, codes.tp_comm)
        return Slice(shape, span.first, span.last, codes.row_comm)

    def as_dtensor(self, local: Tensor, param: Tensor) -> Tensor:
        """The unsharded maxima, replicated: no placement has overlapping ranges. All ranks must call this."""
        whole = assemble(local, self.part(slice_of(param)))
        return dtensor_like(whole, Slice(tuple(whole.shape), 0, len(whole)), param)


def maxima_of(codes: StateTensor) -> BlockMaxima:
    """The layout of the maxima of ``codes``."""
    return BlockMaxima((), codes=codes)


def shares_blocks(part: Slice) -> bool:
    """Whether several ranks may hold elements of one block. The same on all ranks that share the tensor."""
    aligned = math.prod(part.shape[part.row_dims :]) % BLOCK == 0
    if _cuts(part.tp_comm) and (part.tp_dim != 0 or part.tp_blocks):
        return True
    return (_cuts(part.row_comm) or _cuts(part.tp_comm)) and not aligned


def _cuts(comm: Communicator | None) -> bool:
    return comm is not None and comm.size > 1


def dequantise(codes: Tensor, maxima: Tensor, part: Slice, signed: bool) -> Tensor:
    """The numbers that ``codes`` (of the part's local shape) stand for: fp32, of that shape."""
    span = span_of(part)
    if span.dim is None:
        return bmt_kernels.dequantize_blockwise(codes, maxima, signed=signed, block_offset=span.offset)
    index = _held(part, span.dim, codes.device)
    rows = codes.new_zeros(span.shape).index_copy_(span.dim, index, codes)
    values = bmt_kernels.dequantize_blockwise(rows, maxima, signed=signed, block_offset=span.offset)
    return values.index_select(span.dim, index)


def maxima_here(values: Tensor, part: Slice) -> Tensor:
    """The largest magnitude among this rank's elements of each of its blocks; NaN if one is not finite."""
    span = span_of(part)
    blocks = values.new_zeros(span.last - span.first, BLOCK)
    _put(blocks, values, span, part)
    return finite_maximum(blocks)


def finite_maximum(blocks: Tensor) -> Tensor:
    """The largest magnitude of each row; NaN if one is not finite."""
    largest = blocks.abs().amax(dim=1)
    return torch.where(largest.isfinite(), largest, torch.nan)


def quantise(values: Tensor, maxima: Tensor, part: Slice, signed: bool) -> Tensor:
    """Codes of ``values`` (fp32, of the part's local shape), by the ``maxima`` of the whole blocks."""
    span = span_of(part)
    # Where another rank has the elements of a block, its maximum stands for them: so the kernel finds no other.
    blocks = maxima[:, None].repeat(1, BLOCK)
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
    """The indices along ``dim`` of the span's shape of the elements that this rank holds."""
    return row_indices(part, device) if dim == 0 else indices_along(part, dim + part.row_dims - 1, device)


def _rows(blocks: Tensor, span: Span) -> Tensor:
    """The view of blocks (blocks, 256) that is the part's rows."""
    if not len(blocks):
        return blocks.view(span.shape)
    return blocks.view(-1)[span.offset : span.offset + span.stop - span.start].view(span.shape)
