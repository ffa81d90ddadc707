"""The blocks of a batch's 8-bit state that several ranks hold elements of: those at the ends of their parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bmt_comm import Slice

from .blockwise import BLOCK, block_count, span_of
from .logical_params import LogicalParam


@dataclass(frozen=True)
class Edge:
    """The elements of a part in its first or last block.

    Attributes:
        start, stop: of the elements, among the part's.
        offset: of the first of them in the block.
        block: among the part's.
    """

    start: int
    stop: int
    offset: int
    block: int


class SharedBlocks:
    """The blocks whose absmax ranks agree on, of the parameters that share blocks, and the edges of this rank's parts.

    The absmax of all these blocks is one vector. Each parameter has ``sizes[n]`` numbers in it: those of the first
    moment's blocks, then those of the second's. They are the blocks at the ends of parts. They are all blocks of a
    parameter whose parts are scattered, or that is sharded over tensor-parallel ranks, whose rows this rank does not
    know.

    Args:
        parts: of the moments, by the parameter's index in the batch.
        logical_params: of the batch.
        device: of the vectors.

    Attributes:
        edges: of the parts whose elements are consecutive.
        numbers: the range of a parameter's edges among all edges.
        places: the positions of the edges' absmax in the vector, for each moment: (2, edges).
        held: which elements of the edges' blocks this rank has: (edges, 256).
    """

    def __init__(
        self, parts: Mapping[int, Slice], logical_params: Sequence[LogicalParam], device: torch.device
    ) -> None:
        self.parts = dict(parts)
        blocks = {i: _blocks(part, logical_params[i]) for i, part in parts.items()}
        self.sizes = [2 * len(numbers) for numbers in blocks.values()]
        stops = list(itertools.accumulate(self.sizes))
        self._spans = {i: (stop - size, stop) for i, size, stop in zip(parts, self.sizes, stops)}
        self.edges = {i: _edges(part) for i, part in parts.items() if span_of(part).dim is None}
        self.numbers: dict[int, range] = {}
        first, second = [], []
        for i, edges in self.edges.items():
            places = [self._spans[i][0] + blocks[i].index(span_of(parts[i]).first + edge.block) for edge in edges]
            first += places
            self.numbers[i] = range(len(first) - len(places), len(first))
            second += [place + len(blocks[i]) for place in places]
        self.places = torch.tensor([first, second], dtype=torch.int64, device=device)
        self.held = torch.zeros(len(first), BLOCK, dtype=torch.bool, device=device)
        for view in self.views(self.held):
            view.fill_(True)

    def zeros(self) -> Tensor:
        """A vector for the absmax of all blocks."""
        return torch.zeros(sum(self.sizes), dtype=torch.float32, device=self.held.device)

    def of(self, vector: Tensor, i: int) -> Tensor:
        """The view of one parameter's absmax in the vector: (2, blocks)."""
        start, stop = self._spans[i]
        return vector[start:stop].view(2, -1)

    def views(self, rows: Tensor) -> list[Tensor]:
        """The elements that this rank has in ``rows`` (edges, 256)."""
        flat, views = rows.view(-1), []
        for n, edge in enumerate(edge for edges in self.edges.values() for edge in edges):
            start = n * BLOCK + edge.offset
            views.append(flat[start : start + edge.stop - edge.start])
        return views

    def rows(self, values: Callable[[int], Tensor], dtype: torch.dtype) -> Tensor:
        """The elements of the edges among the contiguous values of parts: (edges, 256), 0 elsewhere."""
        rows = torch.zeros(len(self.held), BLOCK, dtype=dtype, device=self.held.device)
        views = iter(self.views(rows))
        for i, edges in self.edges.items():
            flat = values(i).view(-1)
            for edge, view in zip(edges, views):
                view.copy_(flat[edge.start : edge.stop], non_blocking=True)
        return rows

    def absmax(self, values: Callable[[int], Tensor]) -> Tensor:
        """The absmax of the edges, from those of parts."""
        of_edges = [values(i)[edge.block : edge.block + 1] for i, edges in self.edges.items() for edge in edges]
        return torch.cat(of_edges) if of_edges else self.zeros()[:0]


def _edges(part: Slice) -> list[Edge]:
    span = span_of(part)
    blocks = sorted({span.first, span.last - 1}) if span.stop > span.start else []
    ranges = [(max(block * BLOCK, span.start), min((block + 1) * BLOCK, span.stop), block) for block in blocks]
    return [Edge(a - span.start, b - span.start, a % BLOCK, block - span.first) for a, b, block in ranges]


def _blocks(part: Slice, logical: LogicalParam) -> Sequence[int]:
    """The blocks to agree on. The same on all ranks that share the parameter."""
    if part.tp_comm is not None and part.tp_comm.size > 1:
        return range(block_count(part.shape))
    row = math.prod(part.shape[part.row_dims :])
    ends = [n for start, stop in logical.rows if start < stop for n in (start * row, stop * row - 1)]
    return sorted({n // BLOCK for n in ends if row})
