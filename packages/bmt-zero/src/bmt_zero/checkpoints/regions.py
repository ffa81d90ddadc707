"""Where the elements that a rank holds of a logical tensor lie among its bytes.

A tensor lies in a file in row-major order. A rank holds a :class:`~bmt_comm.Slice` of it: consecutive rows of a piece
that tensor parallelism cuts along one dimension. Those are runs of consecutive bytes, at equal distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bmt_comm import Slice


class Region(NamedTuple):
    """Runs of bytes of a logical tensor, at equal distances, and where they are in a rank's part of it.

    Attributes:
        start: the first byte, in the logical tensor.
        run: the length of each run, in bytes.
        local: the first byte in the rank's part.
        runs: their number.
        stride: from one run to the next, in the logical tensor.
        local_stride: the same in the rank's part.
    """

    start: int
    run: int
    local: int
    runs: int = 1
    stride: int = 0
    local_stride: int = 0

    @property
    def stop(self) -> int:
        """After the last byte, in the logical tensor."""
        return self.start + (self.runs - 1) * self.stride + self.run

    @property
    def nbytes(self) -> int:
        return self.run * self.runs

    def moved(self, by: int) -> Region:
        """The same runs, where the logical tensor begins at byte ``by``."""
        return self._replace(start=self.start + by)


def regions_of(where: Slice, itemsize: int) -> list[Region]:
    """What a rank holds of a tensor with elements of ``itemsize`` bytes; empty if it holds nothing."""
    # A part is a range of the elements of its piece, in the piece's row-major order.
    first, last = where.row_start * where.row_numel, where.row_stop * where.row_numel
    if first >= last:
        return []
    if where.tp_dim is None:
        return [Region(first * itemsize, (last - first) * itemsize, 0)]
    outer = math.prod(where.shape[: where.tp_dim])
    inner = math.prod(where.shape[where.tp_dim + 1 :])
    row, piece_row = where.shape[where.tp_dim] * inner, where.tp_extent * inner
    regions = []
    for begin, piece_begin, length in _parts_along(where):
        run = length * inner
        # The runs are at o·row + begin·inner of the logical tensor, and at o·piece_row + piece_begin·inner of the
        # piece, for o < outer. Those at both ends of the range may be incomplete.
        for o, count in _complete(outer, piece_row, piece_begin * inner, run, first, last):
            start = o * piece_row + piece_begin * inner
            low, high = max(start, first), min(start + run, last)
            if low < high:
                logical = o * row + begin * inner + low - start
                regions.append(
                    _joined(Region(logical, high - low, low - first, count, row * (count > 1), piece_row * (count > 1)))
                )
    return [Region(*(n if k == 3 else n * itemsize for k, n in enumerate(region))) for region in regions]


def _parts_along(where: Slice) -> Iterator[tuple[int, int, int]]:
    """Of each block along ``tp_dim``: where this rank's part begins, where that is in the piece, and its length."""
    if not where.tp_blocks or where.tp_comm is None:
        yield where.tp_offset, 0, where.tp_extent
        return
    size, rank = where.tp_comm.size, where.tp_comm.rank
    block = piece = 0
    for length in where.tp_blocks:
        part = length // size
        yield block + part * rank, piece, part
        block, piece = block + length, piece + part


def _complete(outer: int, stride: int, begin: int, run: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The runs, ``begin + o·stride`` for o < ``outer``, that [first, last) meets, as (o, how many from there on).

    Several together only where they are complete.
    """
    low = max(0, min(outer, -(-(first - begin) // stride)))  # the first that begins in the range
    high = max(low, min(outer, (last - begin - run) // stride + 1))  # after the last that ends in it
    if low > 0:
        yield low - 1, 1
    if high > low:
        yield low, high - low
    if high < outer:
        yield high, 1


def _joined(region: Region) -> Region:
    """Runs without gaps are one run."""
    if region.runs > 1 and region.stride == region.run and region.local_stride == region.run:
        return Region(region.start, region.run * region.runs, region.local)
    return region


def clip(region: Region, low: int, high: int) -> list[Region]:
    """The parts of a region within the bytes [low, high): at most three."""
    start, run, local, count, stride, local_stride = region
    if low >= high:
        return []
    if count == 1:
        a, b = max(start, low), min(start + run, high)
        return [Region(a, b - a, local + a - start)] if a < b else []
    first = max(0, (low - start - run) // stride + 1)  # the first run that ends behind low
    last = min(count, -((start - high) // stride))  # after the last one that begins before high

    def part(number: int) -> Region:
        at = start + number * stride
        a, b = max(at, low), min(at + run, high)
        return Region(a, b - a, local + number * local_stride + a - at)

    if last - first <= 1:
        return [part(first)] if first < last else []
    low_cut, high_cut = start + first * stride < low, start + (last - 1) * stride + run > high
    regions = [part(first)] if low_cut else []
    a, b = first + low_cut, last - high_cut
    if b - a == 1:
        regions.append(part(a))
    elif a < b:
        regions.append(Region(start + a * stride, run, local + a * local_stride, b - a, stride, local_stride))
    return [*regions, part(last - 1)] if high_cut else regions


def local_view(flat: Tensor, region: Region) -> Tensor:
    """The bytes of a region in a rank's part, whose bytes ``flat`` (uint8, 1-D) are: (runs, run)."""
    return flat.as_strided((region.runs, region.run), (region.local_stride, 1), flat.storage_offset() + region.local)


def logical_view(flat: Tensor, region: Region, origin: int) -> Tensor:
    """The bytes of a region in a window of the logical tensor, which begins at byte ``origin``: (runs, run)."""
    offset = flat.storage_offset() + region.start - origin
    return flat.as_strided((region.runs, region.run), (region.stride, 1), offset)


def pack(out: Tensor, flat: Tensor, regions: Iterable[Region]) -> None:
    """Copy regions from a rank's part (uint8, 1-D) into ``out`` (uint8, 1-D), one after the other."""
    at = 0
    for region in regions:
        out[at : at + region.nbytes].view(region.runs, region.run).copy_(local_view(flat, region))
        at += region.nbytes


def unpack(window: Tensor, origin: int, packed: Tensor, regions: Iterable[Region]) -> None:
    """Copy what :func:`pack` made to where it lies in a window of the logical tensor."""
    at = 0
    for region in regions:
        logical_view(window, region, origin).copy_(packed[at : at + region.nbytes].view(region.runs, region.run))
        at += region.nbytes


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as uint8, 1-D, on the same memory."""
    return tensor.detach().reshape(-1).view(torch.uint8)
