"""Where parameters lie in a flat buffer of equal shards: pure arithmetic, no tensors.

The parameters of a flat parameter lie one after the other, each contiguous, in a buffer of ``world_size`` equal
shards. If a border between two shards is inside a parameter, it is **between two of its rows**, so each rank holds a
row range. Small gaps before parameters and one at the end ensure this.

A row is indexed by dim 0. A row of a 3-D weight is indexed by dims 0 and 1: packed experts, (experts, R, C), are
divided between any two of their experts × R rows. If a rank could only hold full experts, and there were more ranks
than experts, some ranks would hold many times their share.

A parameter may have a *granularity*: it is then divided only at multiples of so many rows, its granules (heads,
quantisation blocks, all rows).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Placement:
    """One parameter in the flat buffer.

    Attributes:
        index: of its shape among the planned shapes.
        shape: the parameter's shape; a 0-dim parameter is one row of one element.
        offset: of its first element in the flat buffer.
        row_dims: the number of leading dimensions that rows are counted along.
        granularity: borders of shards are at multiples of so many rows.
    """

    index: int
    shape: tuple[int, ...]
    offset: int
    row_dims: int = 1
    granularity: int = 1

    @property
    def rows(self) -> int:
        return math.prod(self.shape[: self.row_dims])

    @property
    def row_numel(self) -> int:
        return math.prod(self.shape[self.row_dims :])

    @property
    def numel(self) -> int:
        return self.rows * self.row_numel

    @property
    def granule(self) -> int:
        """The number of elements that stay on one rank together."""
        return min(self.granularity, self.rows) * self.row_numel

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

    @functools.cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """The half-open ranges of the buffer that belong to no parameter."""
        stops = [0, *(p.offset + p.numel for p in self.placements)]
        starts = [*(p.offset for p in self.placements), self.numel]
        return [(stop, start) for stop, start in zip(stops, starts, strict=True) if stop < start]

    @property
    def padding(self) -> int:
        """The number of elements of the buffer that belong to no parameter."""
        return sum(stop - start for start, stop in self.gaps)

    def rows_of(self, placement: Placement, rank: int) -> tuple[int, int]:
        """The half-open range of rows of a parameter that lie in shard ``rank``."""
        if placement.row_numel == 0:  # rows without elements: rank 0 has all of them
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


def plan_layouts(
    shapes: Sequence[tuple[int, ...]], world_size: int, granularity: Sequence[int] | None = None
) -> list[FlatLayout]:
    """Lay out parameters of ``shapes`` over ``world_size`` ranks, in as few flat buffers as possible.

    Usually one buffer is enough. If row lengths do not divide each other, a buffer in which every border is between
    rows can be mostly padding. The parameters then go into several buffers. In each, padding is at most
    ``world_size`` × its longest row.

    Args:
        shapes: of the parameters.
        world_size: the number of ranks.
        granularity: for each parameter a number of rows: it is divided only at multiples of that. Parameters then also
            go into several buffers if that saves 1 % of the bytes. In each, padding is at most ``world_size`` × its
            largest granule.
    """
    if world_size < 1:
        raise ValueError(f"world_size={world_size} must be positive")
    if not shapes:
        return []
    if granularity is None:
        granularity = [1] * len(shapes)
    if len(granularity) != len(shapes) or min(granularity) < 1:
        raise ValueError(f"granularity={granularity} must be a number of rows for each of {len(shapes)} shapes")
    entries = [
        Placement(i, tuple(shape), 0, 2 if len(shape) == 3 and world_size > 1 else 1, granularity[i])
        for i, shape in enumerate(shapes)
    ]
    # Largest granules first: smaller granules that divide them then follow without a gap.
    entries.sort(key=lambda entry: (-entry.granule, -entry.row_numel))
    single = _plan_one(entries, world_size)
    if single is not None and (max(granularity) == 1 or single.padding <= _LITTLE * sum(e.numel for e in entries)):
        return [single]
    plans = [[single]] if single is not None else []
    planned: dict[tuple[int, ...], FlatLayout | None] = {}
    for parts in _partitions(entries):
        for part, key in [(part, tuple(e.index for e in part)) for part in parts]:
            if key not in planned:
                planned[key] = _plan_one(part, world_size)
        layouts = [layout for part in parts if (layout := planned[tuple(e.index for e in part)]) is not None]
        if len(layouts) == len(parts):
            plans.append(layouts)
    if not plans:  # as where last granules are shorter than the others
        plans.append([layout for part in _chains(entries) for layout in _plan_some(part, world_size)])
    enough = min(sum(layout.numel for layout in plan) for plan in plans) * (1 + _LITTLE)
    return min((plan for plan in plans if sum(layout.numel for layout in plan) <= enough), key=len)


_LITTLE = 0.01
"""A share of the bytes: another flat buffer that saves less is not worthwhile."""


def _chains(entries: Sequence[Placement]) -> list[list[Placement]]:
    """Divide entries into lists in which each granule divides the one before it."""
    chains: list[list[Placement]] = []
    for entry in entries:
        for chain in chains:
            if entry.granule == 0 or chain[-1].granule % entry.granule == 0:
                chain.append(entry)
                break
        else:
            chains.append([entry])
    return chains


def _partitions(entries: Sequence[Placement]) -> Iterator[list[list[Placement]]]:
    """Ways to divide entries among buffers: by chains; entries of a few granules and the rest; by granules."""
    yield _chains(entries)
    by_granule: dict[int, list[Placement]] = {}
    for entry in entries:
        by_granule.setdefault(entry.granule, []).append(entry)
    # Granules with the most elements first: the padding of granules with few elements does not matter.
    largest = sorted(by_granule, key=lambda granule: -sum(e.numel for e in by_granule[granule]))[:3]
    for count in range(1, len(largest) + 1):
        for chosen in itertools.combinations(largest, count):
            rest = [entry for entry in entries if entry.granule not in chosen]
            yield [part for part in ([e for g in chosen for e in by_granule[g]], rest) if part]
            yield [part for part in (*(by_granule[g] for g in chosen), rest) if part]


def _plan_some(entries: Sequence[Placement], world_size: int) -> list[FlatLayout]:
    """One buffer for all entries, if one of many sizes fits; otherwise one for each entry, which always fits."""
    together = _plan_one(entries, world_size, thorough=True)
    if together is not None:
        return [together]
    return [layout for entry in entries if (layout := _plan_one([entry], world_size)) is not None]


def _plan_one(entries: Sequence[Placement], world_size: int, thorough: bool = False) -> FlatLayout | None:
    """The smallest of a few likely shard sizes (of many, if ``thorough``) in which all entries fit, or None."""
    total = sum(e.numel for e in entries)
    lengths = sorted({e.granule for e in entries if e.numel} or {1})
    longest = lengths[-1]
    lower = max(-(-total // world_size), longest if any(e.granularity > 1 and e.numel for e in entries) else 0)
    multiples = {1, *lengths, *(math.lcm(a, longest) for a in lengths), math.lcm(*lengths)}
    candidates = {-(-lower // m) * m for m in multiples} | {lower + length for length in lengths}
    if any(e.granularity > 1 for e in entries) and lower < 8 * longest:  # packing a few large granules is bin packing
        candidates |= {lower + lower * part // 40 for part in range(1, 17)}
    if thorough:
        candidates |= {lower + longest * part // 64 for part in range(65)}
    step = math.gcd(_ALIGNMENT, *lengths)
    for shard in sorted({-(-candidate // step) * step for candidate in candidates}):
        if shard * world_size - total > world_size * longest:
            break
        offsets = _place(entries, shard, world_size)
        if offsets is not None:
            placed = [replace(entry, offset=offset) for entry, offset in zip(entries, offsets, strict=True)]
            return FlatLayout(world_size, shard, tuple(sorted(placed, key=lambda p: (p.offset, p.numel))))
    return None


_ALIGNMENT = 16
"""Parameters begin at multiples of it if all row lengths are: products in float8 need it, and others are faster."""

_MOST_FREE = 16
"""How many free ranges are remembered: thousands of parameters would leave many gaps."""


def _place(entries: Sequence[Placement], shard: int, world_size: int) -> list[int] | None:
    """Offsets that put every entry into the first free range where all borders of shards are between its granules.

    None: they do not fit. Without granularity, gaps are too small to be worth remembering.
    """
    most = _MOST_FREE if any(e.granularity > 1 for e in entries) else 1
    free, offsets = [(0, shard * world_size)], []
    like, n = (-1, -1), 0  # the entry before, and the free range it went into
    for entry in entries:
        if not entry.numel:
            offsets.append(free[0][0] if free else 0)
            continue
        if like != (entry.numel, entry.granule):  # otherwise ranges before n are too small for this entry, too
            like, n = (entry.numel, entry.granule), 0
        while n < len(free):
            offset = _first_fit(*free[n], entry, shard)
            if offset is not None:
                start, stop = free[n]
                free[n : n + 1] = [r for r in ((start, offset), (offset + entry.numel, stop)) if r[0] < r[1]]
                offsets.append(offset)
                forgotten = max(0, len(free) - most)
                del free[:forgotten]
                n = max(0, n - forgotten)
                break
            n += 1
        else:
            return None
    return offsets


def _first_fit(start: int, stop: int, entry: Placement, shard: int) -> int | None:
    """The first offset in a free range at which an entry may lie, or None."""
    numel, granule = entry.numel, entry.granule
    offset = start
    while offset + numel <= stop:
        border = (offset // shard + 1) * shard  # the first one behind the offset
        if offset + numel <= border:
            return offset
        offset += (border - offset) % granule
        if offset + numel <= stop and (offset + numel <= border + shard or shard % granule == 0):
            return offset
        # A second border would fall inside a granule. From the next shard on there may be one border less.
        if offset % shard == 0 or numel > 2 * shard:
            return None
        offset = border
    return None
