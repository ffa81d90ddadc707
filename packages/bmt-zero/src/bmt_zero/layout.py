"""Where parameters lie in a flat buffer of equal shards: pure arithmetic, no tensors.

The parameters of a flat parameter lie one after the other, each contiguous, in a buffer of ``world_size`` equal
shards. Every border between two shards that falls inside a parameter falls **between two of its rows**, so that a
rank holds a plain row range of it. Small gaps before parameters and one at the end make it so.

A row is what follows dim 0. Of a 3-D weight it is what follows dims 0 and 1: packed experts, (experts, R, C), are
divided between any two of their experts × R rows, since a rank that could only hold whole experts would hold many times
its share where ranks are more than experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Placement:
    """One parameter in the flat buffer.

    Attributes:
        index: which of the planned shapes this is.
        shape: the parameter's shape; a 0-dim parameter is one row of one element.
        offset: of its first element in the flat buffer.
        row_dims: the number of leading dimensions that rows are counted along.
    """

    index: int
    shape: tuple[int, ...]
    offset: int
    row_dims: int = 1

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: self.row_dims])

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[self.row_dims :])

    @property
    def numel(self) -> int:
        return self.rows * self.row_numel

    def local_shape(self, rows: int) -> tuple[int, ...]:
        """The shape of ``rows`` of its rows; a 0-dim parameter is ``()`` where it is held and ``(0,)`` elsewhere."""
        return (rows, *self.shape[self.row_dims :]) if self.shape or not rows else ()


@dataclass(frozen=True)
class FlatLayout:
    """Parameters in a flat buffer of ``world_size`` shards of ``shard_numel`` elements each, in the buffer's order."""

    world_size: int
    shard_numel: int
    placements: tuple[Placement, ...]

    @property
    def numel(self) -> int:
        return self.world_size * self.shard_numel

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """The half-open ranges of the buffer that belong to no parameter."""
        stops = [0, *(p.offset + p.numel for p in self.placements)]
        starts = [*(p.offset for p in self.placements), self.numel]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    @property
    def padding(self) -> int:
        """Elements of the buffer that belong to no parameter."""
        return sum(stop - start for start, stop in self.gaps)

    def rows_of(self, placement: Placement, rank: int) -> tuple[int, int]:
        """The half-open range of rows of a parameter that lie in shard ``rank``."""
        if placement.row_numel == 0:  # rows without elements: one rank has them all
            return (0, placement.rows) if rank == 0 else (placement.rows, placement.rows)
        begin = (rank * self.shard_numel - placement.offset) // placement.row_numel
        end = ((rank + 1) * self.shard_numel - placement.offset) // placement.row_numel
        return min(max(begin, 0), placement.rows), min(max(end, 0), placement.rows)

    def offset_in_shard(self, placement: Placement, rank: int) -> int:
        """Where in shard ``rank`` this parameter's rows begin (0 where it holds no elements)."""
        start, stop = self.rows_of(placement, rank)
        if start == stop or placement.row_numel == 0:
            return 0
        return placement.offset + start * placement.row_numel - rank * self.shard_numel


def plan_layouts(shapes: Sequence[tuple[int, ...]], world_size: int) -> list[FlatLayout]:
    """Lay out parameters of ``shapes`` over ``world_size`` ranks, in as few flat buffers as possible.

    One buffer serves where the rows fit together, which is the rule.  Rows whose lengths do not divide each
    other can each have to span many shards; a buffer in which all of them are divided between rows would then
    be mostly padding, and they go into a few buffers instead.  In each, padding is at most
    ``world_size`` × its longest row.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be positive")
    if not shapes:
        return []
    entries = [
        Placement(i, tuple(shape), 0, row_dims=2 if len(shape) == 3 and world_size > 1 else 1)
        for i, shape in enumerate(shapes)
    ]
    # Longest rows first: shorter rows that divide them then start on whole rows without any gap.
    entries.sort(key=lambda entry: -entry.row_numel)
    single = _plan_one(entries, world_size)
    if single is not None:
        return [single]
    chains: list[list[Placement]] = []
    for entry in entries:
        for chain in chains:
            if entry.row_numel == 0 or chain[-1].row_numel % entry.row_numel == 0:
                chain.append(entry)
                break
        else:
            chains.append([entry])
    layouts = [_plan_one(chain, world_size) for chain in chains]
    assert all(layout is not None for layout in layouts), "rows that divide each other always fit"
    return [layout for layout in layouts if layout is not None]


def _plan_one(entries: Sequence[Placement], world_size: int) -> FlatLayout | None:
    """The smallest of a few likely shard sizes in which all entries fit, or None."""
    total = sum(e.numel for e in entries)
    lower = -(-total // world_size)
    lengths = sorted({e.row_numel for e in entries if e.numel} or {1})
    longest = lengths[-1]
    multiples = {1, *lengths, *(math.lcm(a, longest) for a in lengths), math.lcm(*lengths)}
    candidates = {-(-lower // m) * m for m in multiples} | {lower + length for length in lengths}
    for shard in sorted(candidates):
        if shard * world_size - total > world_size * longest:
            break
        offsets = _place(entries, shard, world_size)
        if offsets is not None:
            placed = [replace(entry, offset=offset) for entry, offset in zip(entries, offsets, strict=True)]
            return FlatLayout(world_size, shard, tuple(sorted(placed, key=lambda p: (p.offset, p.numel))))
    return None


def _place(entries: Sequence[Placement], shard: int, world_size: int) -> list[int] | None:
    """Offsets that put every entry behind the one before it with all boundaries of shards between rows, or None."""
    cursor, offsets = 0, []
    for entry in entries:
        row, numel = entry.row_numel, entry.numel
        offset = cursor
        if numel:
            boundary = (cursor // shard + 1) * shard  # the first one behind the cursor
            if cursor + numel > boundary:
                offset = cursor + (boundary - cursor) % row
                if offset + numel > boundary + shard and shard % row:
                    # A second boundary would fall inside a row: start at the next shard instead, if it fits in one.
                    if numel > shard:
                        return None
                    offset = cursor if cursor % shard == 0 else boundary
        offsets.append(offset)
        cursor = offset + numel
    return offsets if cursor <= shard * world_size else None
