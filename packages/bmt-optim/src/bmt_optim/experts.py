"""Packed experts, (experts, R, C), of which a rank holds rows that are counted along two dimensions.

Such a rank holds some rows of one expert, then whole experts, and then some rows of another. Statistics of an expert,
of its columns or of all of it, are then sums over the ranks that hold other rows of the same expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmt_comm import Slice

Pieces = list[tuple[int, int]] | None
"""See :func:`expert_pieces`."""


def experts_of(where: Slice) -> range:
    """The experts, along dimension 0 of the piece, of which this rank holds rows."""
    height = max(1, where.tp_shard_shape[1])
    first = where.row_start // height
    return range(first, -(-where.row_stop // height) if where.row_stop > where.row_start else first)


def expert_pieces(where: Slice) -> Pieces:
    """As numbers of experts and of rows of each: some rows of the first expert, whole experts, some rows of the last.

    ``None`` where rows are counted along one dimension.
    """
    if where.row_dims == 1:
        return None
    height, rows = max(1, where.tp_shard_shape[1]), where.row_stop - where.row_start
    first = min(-where.row_start % height, rows)
    middle, last = divmod(rows - first, height)
    pieces = [(1, first), (middle, height), (1, last)]
    return [(experts, height) for experts, height in pieces if experts and height] or [(0, height)]


def sum_by_expert(values: Tensor, where: Slice) -> Tensor:
    """Sums of ``values``, (rows, \\*), over this rank's rows of each expert of the piece: (experts, \\*)."""
    sums = values.new_zeros(where.tp_shard_shape[0], *values.shape[1:])
    expert, row = experts_of(where).start, 0
    for experts, height in expert_pieces(where) or []:  # index_add_ has no fixed order on a GPU; replicas must have one
        rows = values[row : row + experts * height].view(experts, height, *values.shape[1:])
        sums[expert : expert + experts] += rows.sum(1)
        expert, row = expert + experts, row + experts * height
    return sums


def by_row(values: Tensor, where: Slice) -> Tensor:
    """For each of this rank's rows what its expert has, of ``values``, (experts of this rank, \\*): (rows, \\*)."""
    return values[_expert_of_rows(where, values.device) - experts_of(where).start]


def _expert_of_rows(where: Slice, device: torch.device) -> Tensor:
    rows = torch.arange(where.row_start, where.row_stop, device=device)
    return rows.div(max(1, where.tp_shard_shape[1]), rounding_mode="floor")
