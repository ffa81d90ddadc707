"""Statistics and whole tensors over the ranks that share a parameter, by its :class:`~bmt_comm.Slice`.

Every function here that communicates must be called on all ranks with the same parameters in the same order,
and decides what to communicate from slices alone, never from whether this rank holds rows or gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator, Slice, select_rows, tp_shard_of, unshard_tp

Comms = tuple[Communicator, ...]


def by_comms(slices: Sequence[Slice]) -> list[tuple[Comms, list[int]]]:
    """The distinct sets of communicators among ``slices``, each with the indices that share it.

    They come in an order that any two ranks which share two of the sets agree on.
    """
    found: dict[Comms, list[int]] = {}
    for index, where in enumerate(slices):
        found.setdefault(where.communicators, []).append(index)
    return sorted(found.items(), key=lambda item: [comm.ranks for comm in item[0]])


def all_reduce_over(value: Tensor, comms: Comms, op: str) -> None:
    """Reduce ``value`` in place over the grid of ranks that ``comms`` span."""
    for comm in comms:
        if value.device.type == comm.device.type:
            comm.all_reduce(value, op)
        else:
            moved = value.to(comm.device)
            comm.all_reduce(moved, op)
            value.copy_(moved)


def assemble(local: Tensor, where: Slice) -> Tensor:
    """The whole logical tensor of which this rank holds ``local`` at ``where``, on every rank that shares it.

    Shape ``where.shape``, dtype of ``local``. Bits are moved, not computed with.
    """
    # A 0-dim tensor is one row of one element here.
    rows = where.row_stop - where.row_start
    piece = _concatenate(
        local.detach().reshape(rows, *where.row_shape), 0, where.row_start, where.tp_shard_rows, where.row_comm
    ).reshape(where.tp_shard_shape)
    if where.tp_blocks and where.tp_comm is not None:
        piece = unshard_tp(piece.to(where.tp_comm.device), where)
    elif where.tp_dim is not None:
        piece = _concatenate(piece, where.tp_dim, where.tp_offset, where.shape[where.tp_dim], where.tp_comm)
    return piece.reshape(where.shape)


def cut(full: Tensor, where: Slice) -> Tensor:
    """What a rank at ``where`` holds of ``full`` (shape ``where.shape``): shape ``where.local_shape``."""
    return select_rows(tp_shard_of(full, where), where)


def padded(local: Tensor, where: Slice) -> Tensor:
    """What a rank at ``where`` holds, in a whole tensor of zeros. Of all ranks added up it is :func:`assemble`'s."""
    if tuple(local.shape) == where.shape:
        return local
    found = local.new_zeros(where.shape)
    places = cut(torch.arange(found.numel(), device=local.device).view(where.shape), where)
    found.view(-1)[places.reshape(-1)] = local.reshape(-1)
    return found


def row_indices(where: Slice, device: torch.device) -> Tensor:
    """Which rows of the logical tensor this rank holds: int64, on ``device``."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(min(where.row_dims, len(where.shape))):
        rows = (rows[:, None] * where.shape[dim] + indices_along(where, dim, device)).flatten()
    return rows[where.row_start : where.row_stop]


def indices_along(where: Slice, dim: int, device: torch.device) -> Tensor:
    """The indices along ``dim`` of the logical tensor of this tensor-parallel rank's piece: int64, on ``device``."""
    length = where.shape[dim]
    indices = torch.arange(length, device=device)
    if dim != where.tp_dim:
        return indices
    along = Slice((length,), 0, 0, None, 0, where.tp_offset, where.tp_extent, where.tp_comm, where.tp_blocks)
    return tp_shard_of(indices, along)


def _concatenate(part: Tensor, dim: int, start: int, length: int, comm: Communicator | None) -> Tensor:
    """The tensor of ``length`` along ``dim`` of which this rank has ``part``, from ``start`` on."""
    if comm is None or comm.size == 1:
        return part
    rows = part.movedim(dim, 0).contiguous().to(comm.device)
    extents = torch.empty(comm.size, 2, dtype=torch.int64, device=comm.device)
    comm.all_gather(extents, torch.tensor([start, len(rows)], device=comm.device))
    ranges = extents.tolist()
    longest = max(count for _, count in ranges)
    if longest == 0 or math.prod(rows.shape[1:]) == 0:
        return part.new_zeros((*part.shape[:dim], length, *part.shape[dim + 1 :]))
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    gathered = rows.new_empty((comm.size, *padded.shape))
    comm.all_gather(gathered, padded)
    whole = rows.new_zeros((length, *rows.shape[1:]))
    for theirs, (at, count) in zip(gathered, ranges):
        whole[at : at + count] = theirs[:count]
    return whole.movedim(0, dim)
