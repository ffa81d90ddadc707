"""Statistics over the ranks that share a parameter, and its shards and unsharded tensors, by :class:`~bmt_comm.Slice`.

Every function here that communicates must be called on all ranks with the same parameters in the same order. It
decides what to communicate from slices alone, never from whether this rank holds rows or gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator, Slice, shard_of, tp_shard_of, unshard_tp

Mesh = tuple[Communicator, ...]
"""The communicators along the dimensions of a mesh of ranks."""


def by_mesh(slices: Sequence[Slice]) -> list[tuple[Mesh, list[int]]]:
    """The distinct meshes among ``slices``, each with the indices of the slices that are sharded over it.

    Any two ranks that share two of the meshes get them in the same order.
    """
    indices_of: dict[Mesh, list[int]] = {}
    for index, where in enumerate(slices):
        indices_of.setdefault(where.communicators, []).append(index)
    return sorted(indices_of.items(), key=lambda item: [comm.ranks for comm in item[0]])


def unshard(local: Tensor, where: Slice) -> Tensor:
    """The logical tensor of which this rank holds ``local`` at ``where``, on every rank that shares it.

    Shape ``where.shape``, dtype of ``local``. Bits are moved, not computed with.
    """
    # A 0-dim tensor is one row of one element here.
    rows = where.row_stop - where.row_start
    tp_shard = _concatenate(
        local.detach().reshape(rows, *where.row_shape), 0, where.row_start, where.tp_shard_rows, where.row_comm
    ).reshape(where.tp_shard_shape)
    if where.tp_blocks and where.tp_comm is not None:
        tp_shard = unshard_tp(tp_shard.to(where.tp_comm.device), where)
    elif where.tp_dim is not None:
        tp_shard = _concatenate(tp_shard, where.tp_dim, where.tp_offset, where.shape[where.tp_dim], where.tp_comm)
    return tp_shard.reshape(where.shape)


def padded(local: Tensor, where: Slice) -> Tensor:
    """The shard at ``where`` in a tensor of zeros of shape ``where.shape``. The sum over all ranks is unsharded."""
    if tuple(local.shape) == where.shape:
        return local
    full = local.new_zeros(where.shape)
    places = shard_of(torch.arange(full.numel(), device=local.device).view(where.shape), where)
    full.view(-1)[places.reshape(-1)] = local.reshape(-1)
    return full


def row_indices(where: Slice, device: torch.device) -> Tensor:
    """Which rows of the logical tensor this rank holds: int64, on ``device``."""
    rows = torch.zeros(1, dtype=torch.int64, device=device)
    for dim in range(min(where.row_dims, len(where.shape))):
        rows = (rows[:, None] * where.shape[dim] + indices_along(where, dim, device)).flatten()
    return rows[where.row_start : where.row_stop]


def indices_along(where: Slice, dim: int, device: torch.device) -> Tensor:
    """The indices along ``dim`` of the logical tensor of this tensor-parallel rank's shard: int64, on ``device``."""
    length = where.shape[dim]
    indices = torch.arange(length, device=device)
    if dim != where.tp_dim:
        return indices
    along = Slice((length,), 0, 0, None, 0, where.tp_offset, where.tp_extent, where.tp_comm, where.tp_blocks)
    return tp_shard_of(indices, along)


def _concatenate(part: Tensor, dim: int, start: int, length: int, comm: Communicator | None) -> Tensor:
    """The tensor of ``length`` along ``dim``. This rank has ``part`` of it, from ``start`` on."""
    if comm is None or comm.size == 1:
        return part
    rows = part.movedim(dim, 0).contiguous().to(comm.device)
    ranges = comm.stacked(torch.tensor([start, len(rows)], device=comm.device)).tolist()
    longest = max(count for _, count in ranges)
    if longest == 0 or math.prod(rows.shape[1:]) == 0:
        return part.new_zeros((*part.shape[:dim], length, *part.shape[dim + 1 :]))
    sent = rows.new_zeros((longest, *rows.shape[1:]))
    sent[: len(rows)] = rows
    full = rows.new_zeros((length, *rows.shape[1:]))
    for theirs, (at, count) in zip(comm.stacked(sent), ranges):
        full[at : at + count] = theirs[:count]
    return full.movedim(0, dim)
