"""Which rank writes which bytes. Pure functions of the parts that all ranks have, with the same result on every rank.

[Note: pieces]
    The files of a checkpoint lie one behind the other in one address space. Each file begins at a multiple of 1 MiB. A
    piece is 1 MiB of the address space. One rank writes a piece, so file systems that write back whole pages keep every
    byte, and the rank can compute the checksum of the piece alone.

    Ranks that have the same parts of the same tensors are a replicate group: the replicas of hybrid sharding or DDP.
    Pieces of which one group alone has bytes are distributed over the ranks of the group. Any other piece is written by
    the group that has most of its bytes. If several groups have equally many bytes (the columns of tensor parallelism),
    they take turns. The other groups send their parts of the piece.

    Every rank processes its pieces in the order of the addresses: those that it writes and those that it sends a part
    of. So the lowest unfinished piece never waits for another one, and there is no deadlock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from .headers import Entry, FileLayout
from .regions import Region, clip

PIECE = 1 << 20
"""The size of a piece, in bytes."""


class Holding(NamedTuple):
    """The part of one tensor that the ranks of a group have.

    Attributes:
        entry: the number of the tensor.
        regions: the bytes of the part.
    """

    entry: int
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class ReplicateGroup:
    """Ranks that have the same parts of tensors: ``ranks`` in ascending order."""

    ranks: tuple[int, ...]
    holdings: tuple[Holding, ...]


class AddressSpace:
    """The files of a checkpoint, one behind the other.

    Args:
        files: their layouts.

    Attributes:
        bases: the address of the first byte of each file, a multiple of :data:`PIECE`.
        entries: the tensors of all files. The number of a tensor is its index in this list.
        starts: the address of the first byte of each tensor.
        number: the number of a tensor, by its section and name.
    """

    def __init__(self, files: Sequence[FileLayout]) -> None:
        self.files = list(files)
        self.bases: list[int] = []
        self.entries: list[Entry] = []
        self.starts: list[int] = []
        end = 0
        for file in files:
            self.bases.append(end)
            self.entries += file.entries
            self.starts += [end + offset for offset in file.offsets]
            end += -(-file.size // PIECE) * PIECE
        self.end = end
        names = [(file.section, entry.name) for file in files for entry in file.entries]
        self.number = {name: number for number, name in enumerate(names)}

    def file_of(self, address: int) -> int:
        """The number of the file that an address is in."""
        return bisect_right(self.bases, address) - 1

    def piece_range(self, piece: int) -> tuple[int, int]:
        """The addresses of a piece. The last piece of a file ends at the end of the file."""
        file = self.file_of(piece * PIECE)
        return piece * PIECE, min((piece + 1) * PIECE, self.bases[file] + self.files[file].size)

    def entries_in(self, low: int, high: int) -> range:
        """The numbers of the tensors that have bytes in a range of addresses. It may include empty tensors."""
        return range(max(0, bisect_right(self.starts, low) - 1), bisect_left(self.starts, high))


@dataclass
class Part:
    """The bytes of a piece that come from one rank: regions of tensors, by address, in the order of the message."""

    rank: int
    regions: list[tuple[int, Region]] = field(default_factory=list)  # (number of the tensor, its bytes)

    @property
    def nbytes(self) -> int:
        return sum(region.nbytes for _, region in self.regions)


@dataclass
class Task:
    """A piece that this rank writes, or sends a part of.

    Attributes:
        piece: its number.
        owner: the rank that writes it.
        parts: the parts of all ranks; only this rank's own part if another rank writes the piece.
    """

    piece: int
    owner: int
    parts: list[Part]


class _Item(NamedTuple):
    """A region, by address, of a tensor, and the number of the group that has it."""

    start: int
    stop: int
    group: int
    region: Region


class WritePlan:
    """The pieces that one rank writes or sends parts of.

    Args:
        space: the addresses of the files and tensors.
        groups: the replicate groups, in the order of their first ranks. Every rank is in one of them.
        single: numbers of tensors of which only the lowest rank's values are written: unsharded ones such as buffers,
            which may differ between ranks.
        rank: the rank.

    Raises:
        ValueError: no rank has some bytes of a tensor.
    """

    def __init__(
        self, space: AddressSpace, groups: Sequence[ReplicateGroup], single: frozenset[int], rank: int
    ) -> None:
        self.space, self.groups, self.single, self.rank = space, groups, single, rank
        self._own = next(number for number, group in enumerate(groups) if rank in group.ranks)
        self._items: dict[int, list[_Item]] = {}
        self._stops_ascend: dict[int, bool] = {}
        for number, group in enumerate(groups):
            for entry, regions in group.holdings:
                items = self._items.setdefault(entry, [])
                if entry in single and items and items[0].group != number:
                    continue
                base = space.starts[entry]
                for region in regions:
                    moved = region.moved(base)
                    items.append(_Item(moved.start, moved.stop, number, moved))
        for entry, items in self._items.items():
            items.sort()
            stops = [item.stop for item in items]
            self._stops_ascend[entry] = all(a <= b for a, b in pairwise(stops))
        self._check_cover()

    def tasks(self) -> Iterator[Task]:
        """This rank's pieces, in the order of their addresses."""
        own, ranks = self._own, self.groups[self._own].ranks
        shared: set[int] = set()
        alone: list[tuple[int, int, int]] = []  # (first piece, after the last, number of the tensor)
        for entry, _ in self.groups[own].holdings:
            for item in self._items[entry]:
                if item.group != own:
                    continue
                low, high = item.start // PIECE, -(-item.stop // PIECE)
                inside = -(-item.start // PIECE), item.stop // PIECE
                if item.region.runs == 1 and inside[0] < inside[1] and self._is_alone(item, entry):
                    shared.update(range(low, inside[0]), range(inside[1], high))
                    alone.append((*inside, entry))
                else:
                    shared.update(range(low, high))
        for file, base in zip(self.space.files, self.space.bases):  # headers, which every rank can write
            shared.update(range(base // PIECE, -(-(base + len(file.head)) // PIECE)))
        tasks = {piece: task for piece in shared if (task := self._task(piece)) is not None}
        for first, last, entry in alone:
            part = ranks if entry not in self.single else ranks[:1]
            if self.rank not in part:
                continue
            n, place, count = last - first, part.index(self.rank), len(part)
            for piece in range(first + n * place // count, first + n * (place + 1) // count):
                if piece not in tasks:
                    low, high = self.space.piece_range(piece)
                    region = next(self._own_regions(entry, low, high))
                    tasks[piece] = Task(piece, self.rank, [Part(self.rank, [(entry, region)])])
        for piece in sorted(tasks):
            yield tasks[piece]

    def _own_regions(self, entry: int, low: int, high: int) -> Iterator[Region]:
        for item in self._overlapping(entry, low, high):
            if item.group == self._own:
                yield from clip(item.region, low, high)

    def _overlapping(self, entry: int, low: int, high: int) -> Iterator[_Item]:
        """The items of a tensor whose spans overlap [low, high)."""
        items = self._items.get(entry, [])
        ascend = self._stops_ascend.get(entry, True)
        for place in range(bisect_left(items, (high,)) - 1, -1, -1):
            item = items[place]
            if item.stop > low:
                yield item
            elif ascend:
                return

    def _items_in(self, low: int, high: int) -> Iterator[tuple[_Item, int]]:
        for entry in self.space.entries_in(low, high):
            for item in self._overlapping(entry, low, high):
                yield item, entry

    def _is_alone(self, own: _Item, entry: int) -> bool:
        """Whether no other group has bytes of the complete pieces in a region."""
        low, high = -(-own.start // PIECE) * PIECE, own.stop // PIECE * PIECE
        return all(item.group == self._own for item in self._overlapping(entry, low, high))

    def _task(self, piece: int) -> Task | None:
        """This rank's task for a piece that several groups may have bytes of; ``None`` if it has none."""
        low, high = self.space.piece_range(piece)
        held: dict[int, list[tuple[int, Region]]] = {}
        for item, entry in self._items_in(low, high):
            clipped = clip(item.region, low, high)
            if clipped:
                held.setdefault(item.group, []).extend((entry, region) for region in clipped)
        if not held:  # only bytes of a header
            ranks = self.groups[piece % len(self.groups)].ranks
            owner = ranks[piece % len(ranks)]
            return Task(piece, owner, []) if owner == self.rank else None
        sizes = {group: sum(region.nbytes for _, region in regions) for group, regions in held.items()}
        most = max(sizes.values())
        equal = sorted(group for group, size in sizes.items() if size == most)
        chosen = equal[piece % len(equal)]
        owner_ranks = self.groups[chosen].ranks
        owner = owner_ranks[piece % len(owner_ranks)]
        parts: dict[int, Part] = {owner: Part(owner)}
        seen: set[tuple[int, int, int, int]] = set()
        for group in [chosen, *sorted(held.keys() - {chosen})]:
            ranks = self.groups[group].ranks
            for entry, region in sorted(held[group]):
                key = (entry, region.start, region.run, region.runs)
                if key in seen:
                    continue
                seen.add(key)
                if entry in self.single:
                    rank = ranks[0]
                else:
                    rank = owner if group == chosen else ranks[piece % len(ranks)]
                parts.setdefault(rank, Part(rank)).regions.append((entry, region))
        if owner == self.rank:
            return Task(piece, owner, list(parts.values()))
        return Task(piece, owner, [parts[self.rank]]) if self.rank in parts else None

    def _check_cover(self) -> None:
        for number, entry in enumerate(self.space.entries):
            items = self._items.get(number, [])
            if not entry.nbytes:
                continue
            distinct = {item.region for item in items}
            if sum(region.nbytes for region in distinct) < entry.nbytes or _gap(
                distinct, entry, self.space.starts[number]
            ):
                raise ValueError(f"no rank holds all rows of {entry}; give every rank the same model and optimizers")


def _gap(regions: set[Region], entry: Entry, base: int) -> bool:
    """Whether regions leave a gap in a tensor. Strided regions are not checked: they complement each other."""
    if any(region.runs > 1 for region in regions):
        return False
    end = base
    for region in sorted(regions):
        if region.start > end:
            return True
        end = max(end, region.stop)
    return end < base + entry.nbytes


def replicate_groups(holdings: Mapping[int, tuple[Holding, ...]]) -> list[ReplicateGroup]:
    """The replicate groups, from the parts of tensors that each rank has."""
    ranks: dict[tuple[Holding, ...], list[int]] = {}
    for rank in sorted(holdings):
        ranks.setdefault(holdings[rank], []).append(rank)
    return [ReplicateGroup(tuple(members), held) for held, members in ranks.items()]
