"""Packed experts, (experts, R, C), whose rows, counted along the first two dimensions, are sharded.

A rank then holds some rows of one expert, complete experts, and some rows of another. A statistic of an expert, or of
its columns, is the sum over the ranks that hold other rows of the same expert.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmt_comm import Slice

ExpertBlocks = list[tuple[int, int]] | None
"""See :func:`expert_blocks`."""


def experts_of(where: Slice) -> range:
    """The experts of which this rank holds rows, along dimension 0 of the tensor-parallel shard."""
    height = max(1, where.tp_shard_shape[1])
    first = where.row_start // height
    return range(first, -(-where.row_stop // height) if where.row_stop > where.row_start else first)


def expert_blocks(where: Slice) -> ExpertBlocks:
    """This rank's rows as (experts, rows of each): some rows of the first expert, complete experts, rows of the last.

    ``None`` where rows are counted along one dimension.
    """
    if where.row_dims == 1:
        return None
    height, rows = max(1, where.tp_shard_shape[1]), where.row_stop - where.row_start
    first = min(-where.row_start % height, rows)
    middle, last = divmod(rows - first, height)
    blocks = [(1, first), (middle, height), (1, last)]
    return [(experts, height) for experts, height in blocks if experts and height] or [(0, height)]


def sum_by_expert(values: Tensor, where: Slice) -> Tensor:
    """``values``, (rows, \\*), summed over this rank's rows, per expert of the tp shard: (experts, \\*)."""
    sums = values.new_zeros(where.tp_shard_shape[0], *values.shape[1:])
    expert, row = experts_of(where).start, 0
    # Not index_add_: it has no fixed order on a GPU, and replicas must get the same bits.
    for experts, height in expert_blocks(where) or []:
        rows = values[row : row + experts * height].view(experts, height, *values.shape[1:])
        sums[expert : expert + experts] += rows.sum(1)
        expert, row = expert + experts, row + experts * height
    return sums


def by_row(values: Tensor, where: Slice) -> Tensor:
    """``values``, (experts of this rank, \\*), repeated for each of this rank's rows: (rows, \\*)."""
    return values[_expert_of_rows(where, values.device) - experts_of(where).start]


def _expert_of_rows(where: Slice, device: torch.device) -> Tensor:
    rows = torch.arange(where.row_start, where.row_stop, device=device)
    return rows.div(max(1, where.tp_shard_shape[1]), rounding_mode="floor")
