"""The byte ranges of a logical tensor that a rank has.

A tensor is in a file in row-major order. A rank has a :class:`~bmt_comm.Slice` of it: consecutive rows of a
tensor-parallel shard, which is sharded along one dimension. These are runs of consecutive bytes, at equal distances.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from bmt_comm import Slice
from bmt_comm.slice import block_parts


class Region(NamedTuple):
    """Runs of bytes of a logical tensor, at equal distances, and their offsets in a rank's part of it.

    Attributes:
        start: the first byte, in the logical tensor.
        run: the length of each run, in bytes.
        local: the first byte, in the rank's part.
        runs: the number of runs.
        stride: from one run to the next, in bytes of the logical tensor.
        local_stride: from one run to the next, in bytes of the rank's part.
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
        """The same runs, if the logical tensor begins at byte ``by``."""
        return self._replace(start=self.start + by)


def regions_of(where: Slice, itemsize: int) -> list[Region]:
    """The regions of a slice of a tensor with elements of ``itemsize`` bytes; empty if the slice is empty."""
    # The slice is a range of the elements of a tensor-parallel shard, in the shard's row-major order.
    first, last = where.row_start * where.row_numel, where.row_stop * where.row_numel
    if first >= last:
        return []
    if where.tp_dim is None:
        return [Region(first * itemsize, (last - first) * itemsize, 0)]
    outer = math.prod(where.shape[: where.tp_dim])
    inner = math.prod(where.shape[where.tp_dim + 1 :])
    row, shard_row = where.shape[where.tp_dim] * inner, where.tp_extent * inner
    regions = []
    parts = [(where.tp_offset, 0, where.tp_extent)]
    if where.tp_blocks and where.tp_comm is not None:
        parts = block_parts(where.tp_blocks, where.tp_comm.rank, where.tp_comm.size)
    for begin, shard_begin, length in parts:
        run = length * inner
        # The runs are at o·row + begin·inner of the logical tensor, and at o·shard_row + shard_begin·inner of the
        # shard, for o < outer. Those at both ends of the range may be incomplete.
        for o, count in _complete(outer, shard_row, shard_begin * inner, run, first, last):
            start = o * shard_row + shard_begin * inner
            low, high = max(start, first), min(start + run, last)
            if low < high:
                logical = o * row + begin * inner + low - start
                regions.append(
                    _merged(Region(logical, high - low, low - first, count, row * (count > 1), shard_row * (count > 1)))
                )
    return [Region(*(n if k == 3 else n * itemsize for k, n in enumerate(region))) for region in regions]


def _complete(outer: int, stride: int, begin: int, run: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """The runs at ``begin + o·stride`` (o < ``outer``) that overlap [first, last), as (o, number of runs from o on).

    Incomplete runs are separate.
    """
    low = max(0, min(outer, -(-(first - begin) // stride)))  # the first that begins in the range
    high = max(low, min(outer, (last - begin - run) // stride + 1))  # after the last that ends in it
    if low > 0:
        yield low - 1, 1
    if high > low:
        yield low, high - low
    if high < outer:
        yield high, 1


def _merged(region: Region) -> Region:
    """The same bytes as one run, if the runs have no gaps."""
    if region.runs > 1 and region.stride == region.run and region.local_stride == region.run:
        return Region(region.start, region.run * region.runs, region.local)
    return region


def clip(region: Region, low: int, high: int) -> list[Region]:
    """The parts of a region within the bytes [low, high), as at most three regions."""
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
    first_is_partial, last_is_partial = start + first * stride < low, start + (last - 1) * stride + run > high
    regions = [part(first)] if first_is_partial else []
    a, b = first + first_is_partial, last - last_is_partial
    if b - a == 1:
        regions.append(part(a))
    elif a < b:
        regions.append(Region(start + a * stride, run, local + a * local_stride, b - a, stride, local_stride))
    return [*regions, part(last - 1)] if last_is_partial else regions


def local_view(flat: Tensor, region: Region) -> Tensor:
    """A view of a region in ``flat``, the bytes (uint8, 1-D) of a rank's part: (runs, run)."""
    return flat.as_strided((region.runs, region.run), (region.local_stride, 1), flat.storage_offset() + region.local)


def logical_view(flat: Tensor, region: Region, origin: int) -> Tensor:
    """A view of a region in ``flat``, the bytes (uint8, 1-D) of the logical tensor from ``origin`` on: (runs, run)."""
    offset = flat.storage_offset() + region.start - origin
    return flat.as_strided((region.runs, region.run), (region.stride, 1), offset)


def pack(out: Tensor, flat: Tensor, regions: Iterable[Region]) -> None:
    """Copy regions from a rank's part (uint8, 1-D) into ``out`` (uint8, 1-D), one after the other."""
    at = 0
    for region in regions:
        out[at : at + region.nbytes].view(region.runs, region.run).copy_(local_view(flat, region))
        at += region.nbytes


def unpack(window: Tensor, origin: int, packed: Tensor, regions: Iterable[Region]) -> None:
    """Copy the result of :func:`pack` into a window of the logical tensor, which begins at byte ``origin``."""
    at = 0
    for region in regions:
        logical_view(window, region, origin).copy_(packed[at : at + region.nbytes].view(region.runs, region.run))
        at += region.nbytes


def flat_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a contiguous tensor, as uint8, 1-D, on the same memory."""
    flat = tensor.detach().reshape(-1)
    if flat.numel() == 1:  # its stride may be any number
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)
